"""A plan as one bash script, for machines where Surefoot is not installed yet."""

from __future__ import annotations

from shlex import quote

from surefoot.setup.plan import STATE_FOLDER, Plan, Step

#: Exit code of a script that waits for a person: a restart, a new login, or something that only they can do.
WAITING = 3

_HEAD = """\
#!/usr/bin/env bash
# Written by `surefoot setup --script`. {machine}
#
# Run it as yourself, not as root: it asks for root with sudo, in steps marked [root] only.
# It works in the folder that it stands in, and keeps logs in {state}.
# Run it again after a failure, a restart or a new login: steps whose checks pass are not repeated.
# It ends with 0 when every step is done and verified, with 1 when one failed, and with {waiting} when it waits for you.
{notes}# shellcheck disable=SC1091 # /etc/os-release is read where the script runs
set -euo pipefail
cd "$(dirname "${{BASH_SOURCE[0]:-.}}")"
mkdir -p {state}/logs
export LC_ALL=C.UTF-8 PIP_NO_INPUT=1 PIP_DISABLE_PIP_VERSION_CHECK=1

exec 9> {state}/lock
if command -v flock > /dev/null && ! flock --nonblock 9; then
  echo "another setup is at work in this folder" >&2
  exit 1
fi
if ((EUID == 0)) && ! command -v sudo > /dev/null; then
  sudo() {{ "$@"; }}
fi
"""

# The checks run outside of any condition, since bash ignores `set -e` inside of one.
_STEP = """
# step ID TITLE plain|root|login|restart|wait: runs `commands` unless `verify` passes, then `verify` again.
step() {{
  local id=$1 title=$2 kind=$3 log={state}/logs/$1.log status
  set +e
  (set -e; verify) > "$log" 2>&1
  status=$?
  set -e
  if ((status == 0)); then
    echo "skip  $id: its check passes already"
    return
  fi
  if [[ $kind == wait ]]; then
    echo "stop  $id: $title. Do this, then run this script again:"
    by_hand
    exit {waiting}
  fi
  if [[ $kind != plain ]] && ((EUID != 0)); then
    echo "root  $id: $title. This step needs root:"
    sudo -v
  fi
  echo "run   $id: $title"
{clear}  echo "$id" > {state}/unfinished
  set +e
  (set -e; commands) 2>&1 | tee "$log"
  status=${{PIPESTATUS[0]}}
  set -e
  if ((status != 0)); then
    echo "FAIL  $id ended with $status; its whole output is in $log" >&2
    exit 1
  fi
  set +e
  (set -e; verify) >> "$log" 2>&1
  status=$?
  set -e
  if ((status != 0)) && [[ $kind == login ]]; then
    echo "stop  $id: log out and in again, then run this script again"
    exit {waiting}
  fi
  if ((status != 0)); then
    echo "FAIL  $id ended without an error, but its check fails; see the end of $log" >&2
    exit 1
  fi
  rm -f {state}/unfinished
  echo "done  $id"
  if [[ $kind == restart ]]; then
    echo "stop  $id: start the machine again, then run this script again"
    exit {waiting}
  fi
}}
"""

# pip writes a package's RECORD last: without it a killed pip takes the package for installed.
_CLEAR = """\
  if [[ -e {state}/unfinished ]]; then
    for info in {folder}/lib/python3*/site-packages/*.dist-info; do
      if [[ -d $info && ! -e $info/RECORD ]]; then rm -rf "$info"; fi
    done
  fi
"""


def to_script(plan: Plan) -> str:
    """Write a plan as a bash script that can be run again and again.

    Args:
        plan: the plan.

    Returns:
        The script: each step is skipped while its checks pass, else run and checked; the first failure ends it, and so
        does a step that needs a restart or a new login.
    """
    notes = "".join(_comment(f"Note: {note}") + "#\n" for note in plan.notes)
    own = plan.wish.env in ("venv", "uv")
    clear = _CLEAR.format(state=STATE_FOLDER, folder=quote(plan.wish.folder)) if own else ""
    head = _HEAD.format(machine=_line(plan.machine), state=STATE_FOLDER, waiting=WAITING, notes="#\n" + notes)
    parts = [head, _STEP.format(state=STATE_FOLDER, waiting=WAITING, clear=clear)]
    parts += [_step(number, plan.steps) for number in range(1, len(plan.steps) + 1)]
    parts.append('\necho "All steps are done and verified."\n')
    return "".join(parts)


def _step(number: int, steps: tuple[Step, ...]) -> str:
    step = steps[number - 1]
    mark = " [root]" if step.root and not step.satisfied else ""
    text = f"\n# ---- {number}/{len(steps)} {step.id}{mark}: {_line(step.title)}\n" + _comment(step.reason)
    if step.satisfied:
        return text + _comment(f"Done already when this was written: {step.satisfied}")
    text += "".join(_comment(f"undo: {line}") for line in step.undo)
    kind = _kind(step, steps[number:])
    done = f"{STATE_FOLDER}/{step.id}.done"  # for a step without a check there is nothing else to go by
    text += _function("verify", step.verify or (f"test -e {done}",))
    if kind == "wait":
        text += _function("by_hand", tuple(f"echo {quote('    ' + line.lstrip('# '))}" for line in step.commands))
    else:
        text += _function("commands", (*step.commands, *(() if step.verify else (f"touch {done}",))))
    return text + f"step {quote(step.id)} {quote(_line(step.title))} {kind}\n"


def _kind(step: Step, later: tuple[Step, ...]) -> str:
    """Say how a step runs.

    Args:
        step: the step.
        later: the steps behind it.

    Returns:
        `wait`: it is the person's. `restart`: it runs as root, then waits for a restart, unless a later step of the
        plan is that restart. `login`: it runs as root and may need a new login to show. `root`, `plain`.
    """
    by_hand = all(line.lstrip().startswith("#") for line in step.commands)
    if by_hand or _restarts(step) or (step.login and not step.root):
        return "wait"
    if step.reboot and not any(_restarts(other) and not other.satisfied for other in later):
        return "restart"
    return ("login" if step.login else "root") if step.root else "plain"


def _restarts(step: Step) -> bool:
    return step.reboot and any("reboot" in line for line in step.commands)


def _function(name: str, lines: tuple[str, ...]) -> str:
    # Not indented: a line may hold a text of several lines.
    return "\n".join([f"{name}() {{", *lines, "}"]) + "\n"


def _line(text: str) -> str:
    return " ".join(text.split())


def _comment(text: str) -> str:
    return "".join(f"# {line}\n" for line in text.splitlines())
