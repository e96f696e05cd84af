from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from surefoot.config import Config, KeyInfo, all_keys, load_config, make_config
from surefoot.errors import UserError

TEXT = st.text(max_size=12).filter(lambda text: text != "???")
WORD = st.text("abcdefgh_xyz$\\{}. :#'\"1e-4", min_size=1, max_size=10).filter(lambda text: text != "???")


def usable_keys() -> dict[str, st.SearchStrategy[Any]]:
    """Every key that may stand in a YAML, with a strategy for its values; secrets are not written and left out."""
    keys = [info for info in all_keys().values() if info.status != "not_yet" and not info.secret]
    return {info.name: values_of(info) for info in keys}


def values_of(info: KeyInfo) -> st.SearchStrategy[Any]:
    if info.name == "device":
        return st.sampled_from(["auto", "cpu", "cuda", "cuda:3"])
    return st.one_of([_of_type(kind, info) for kind in info.types])


def _of_type(kind: Any, info: KeyInfo) -> st.SearchStrategy[Any]:
    if get_origin(kind) is Literal:
        return st.sampled_from([value for value in get_args(kind) if value not in info.refused])
    if get_origin(kind) is list:
        item = get_args(kind)[0]
        return st.lists(WORD if item is str else _of_type(item, info), max_size=3)
    if get_origin(kind) is dict:
        return st.dictionaries(st.text("abc_", min_size=1, max_size=4), st.integers(0, 9) | WORD, max_size=2)
    if kind is bool:
        return st.booleans()
    if kind is str:
        return TEXT | WORD
    low, high = _limits(info)
    if kind is int:
        return st.integers(max(int(low), -(2**40)), min(int(high), 2**40))
    return st.floats(low, high, allow_nan=False, allow_infinity=False, exclude_min=low == 0, exclude_max=high == 1)


def _limits(info: KeyInfo) -> tuple[float, float]:
    low, high = -1e9, 1e9
    for rule in Config.model_fields[info.name].metadata:
        low = max(low, getattr(rule, "ge", None) if getattr(rule, "ge", None) is not None else low)
        low = max(low, getattr(rule, "gt", None) if getattr(rule, "gt", None) is not None else low)
        high = min(high, getattr(rule, "le", None) if getattr(rule, "le", None) is not None else high)
        high = min(high, getattr(rule, "lt", None) if getattr(rule, "lt", None) is not None else high)
    return (1, high) if info.name == "memory" else (low, high)


BASE = {"model_name_or_path": "folder/model", "dataset": ["rows"]}
KEYS = usable_keys()


@st.composite
def some_settings(draw):
    names = draw(st.lists(st.sampled_from(sorted(KEYS)), unique=True, max_size=14))
    return {name: draw(KEYS[name]) for name in names if name not in BASE} | BASE


# What makes most single settings possible.
COMPANY = {"max_steps": 100, "val_size": 10}


def accepted_part(values: dict, kept: set[str] = frozenset()) -> dict:
    """Drop the keys that problems name until none is left: every problem must name a key that was given."""
    values = dict(values)
    while True:
        try:
            make_config(values)
        except UserError as error:
            named = {problem.key for problem in error.problems}
            assert named and named <= set(values) - set(BASE) - kept, (named, values)
            values = {key: value for key, value in values.items() if key not in named}
        else:
            return values


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(values=some_settings())
def test_any_settings_survive_being_written_and_read(values, tmp_path_factory):
    config = make_config(accepted_part(values))
    path = tmp_path_factory.mktemp("settings") / "resolved.yaml"
    path.write_text(config.to_yaml(), encoding="utf-8")
    again = load_config(path)
    assert again.model_dump() == config.model_dump()
    assert again.effective_cutoff_len == config.effective_cutoff_len
    assert again.to_yaml() == config.to_yaml()


@settings(max_examples=60, deadline=None)
@given(values=some_settings())
def test_yaml_json_and_command_line_mean_the_same(values, tmp_path_factory):
    def plain(value):  # what JSON and YAML write alike, and no interpolation
        text = json.dumps(value, ensure_ascii=False)
        return text.isascii() and text.isprintable() and "$" not in text and "\x7f" not in text

    values = {key: value for key, value in accepted_part(values).items() if plain(value)}
    path = tmp_path_factory.mktemp("settings") / "settings.json"
    path.write_text(json.dumps(values), encoding="utf-8")
    yaml_path = path.with_suffix(".yaml")
    yaml_path.write_text("\n".join(f"{key}: {json.dumps(value)}" for key, value in values.items()), encoding="utf-8")
    tokens = [f"{key}={json.dumps(value)}" for key, value in values.items()]
    expected = make_config(values, source=path)
    assert load_config(path).model_dump() == expected.model_dump()
    assert load_config(yaml_path).model_dump() == expected.model_dump()
    assert (
        load_config(None, [*tokens, f"output_dir={json.dumps(expected.output_dir)}"]).model_dump()
        == expected.model_dump()
    )


@pytest.mark.parametrize("info", [info for info in all_keys().values() if info.status == "works"], ids=lambda i: i.name)
def test_every_choice_of_every_working_key_survives(info: KeyInfo, tmp_path: Path):
    choices = [value for kind in info.types if get_origin(kind) is Literal for value in get_args(kind)]
    choices += [True, False] if bool in info.types else []
    path = tmp_path / "resolved.yaml"
    for value in choices:
        if value in info.refused or info.name in BASE:
            continue
        config = make_config(accepted_part(BASE | COMPANY | {info.name: value}, kept=set(COMPANY)))
        path.write_text(config.to_yaml(), encoding="utf-8")
        assert load_config(path).model_dump() == config.model_dump()


@pytest.mark.parametrize(
    "text",
    [
        "1e-4",
        "${seed}",
        "\\${seed}",
        "a\\\\${b}",
        "yes",
        "null",
        "0x10",
        "1_000",
        "~",
        "a: b",
        "#",
        "- x",
        "é漢😀",
        "\t",
        " x ",
    ],
)
def test_awkward_texts_survive(text: str, tmp_path: Path):
    config = make_config(BASE | {"default_system": text, "lora_target": [text]})
    path = tmp_path / "resolved.yaml"
    path.write_text(config.to_yaml(), encoding="utf-8")
    again = load_config(path)
    assert (again.default_system, again.lora_target) == (text, [text])


def test_secrets_are_neither_written_nor_shown():
    secrets = {info.name: f"s3cret-{info.name}" for info in all_keys().values() if info.secret}
    secrets.pop("swanlab_api_key")  # refused, see below
    assert "hf_hub_token" in secrets and "hub_token" in secrets
    config = make_config(BASE | secrets)
    assert config.hf_hub_token == "s3cret-hf_hub_token"
    text = config.to_yaml()
    assert "s3cret" not in text + repr(config) + str(config.warnings) + str(config.filled)
    assert "# hf_hub_token: (set, and kept secret)" in text


def test_a_secret_is_not_shown_when_it_is_refused():
    with pytest.raises(UserError) as caught:
        make_config(BASE | {"swanlab_api_key": "s3cret"})
    assert "s3cret" not in str(caught.value)
