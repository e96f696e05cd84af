"""The steps of a plan whose environment is a docker image: build it, then check it in a container with the GPU."""

from __future__ import annotations

from surefoot.errors import UserError
from surefoot.machine.facts import Machine
from surefoot.setup.access import run_flags
from surefoot.setup.dockerfile import to_dockerfile
from surefoot.setup.plan import STATE_FOLDER, Plan, Step
from surefoot.setup.python_env import kept
from surefoot.setup.target import Target

NAME = "surefoot-env"
_END = "END_OF_DOCKERFILE"


def image_steps(m: Machine, target: Target, inside: Plan, below: tuple[Step, ...]) -> tuple[Step, ...]:
    """Plan building the image and the checks that need the GPU.

    Args:
        m: the host.
        target: what is planned for.
        inside: the plan inside the image.
        below: the host's steps.

    Returns:
        The steps `env`, `smoke` and `doctor`.

    Raises:
        UserError: this is a container already.
    """
    if m.container:
        raise UserError(
            f"no image is built inside a container ({m.container})",
            hint="would match: --env venv, or run it on the host",
            key="--env",
        )
    host = {step.id for step in below}
    todo = [step for step in inside.steps if step.id not in host | {"torch-check", "smoke", "doctor"}]
    checks = {step.id: step for step in inside.steps}
    text = to_dockerfile(inside, m).rstrip("\n")
    path = f"{STATE_FOLDER}/Dockerfile"
    context = f"-f {path} ." if "\nCOPY " in text else f"- < {path}"  # nothing is sent that nothing needs
    env = Step(
        id="env",
        title=f"Build the image {NAME}",
        reason="--env docker: torch and the trainer go into an image; the driver stays the host's",
        commands=(
            f"mkdir -p {STATE_FOLDER}",
            f"cat > {path} <<'{_END}'\n{text}\n{_END}",
            f"docker build -t {NAME} {context}",
        ),
        verify=(f"docker image inspect {NAME} > /dev/null",),
        undo=(f"docker image rm {NAME}",),
        needs=tuple(step.id for step in below[-1:]),
        disk_gib=1 + sum(step.disk_gib for step in todo),
        minutes=2 + sum(step.minutes for step in todo),
        downloads=("0.1 GiB, the base image", *(d for step in todo for d in step.downloads)),
    )
    steps = [env]
    container = " ".join(part for part in ("docker run --rm", run_flags(m, target), NAME) if part)
    commands = {"smoke": "surefoot setup smoke", "doctor": "surefoot doctor"}
    for name, command in commands.items():
        path = f"{STATE_FOLDER}/{name}.txt"
        steps.append(
            Step(
                id=name,
                title=checks[name].title,
                reason=checks[name].reason,
                commands=kept(f"{container} {command}", f"{name}.txt"),
                verify=(f"test -s {path}", f"docker image inspect {NAME} > /dev/null"),
                undo=(f"rm -f {path}",),
                needs=(steps[-1].id,),
                minutes=checks[name].minutes,
            )
        )
    return tuple(steps)
