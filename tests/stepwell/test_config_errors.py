"""Every mistake in a configuration gets one line with the key, the value and what is right."""

import subprocess
import sys
from pathlib import Path

import pytest

from stepwell.config.load import load_config
from tests.stepwell.configuring import fails


def command(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "stepwell", *args],
        capture_output=True,
        text=True,
        check=False,
    )


# --- overrides that are none -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "remedy"),
    [
        ("trainer.total_steps", "write trainer.total_steps=VALUE"),
        ("config.yaml", "write --config config.yaml"),
        (__file__, f"write --config {__file__}"),
        ("quickstart", "write --config quickstart"),
        ("=5", "write KEY=5"),
        ("run..name=x", "write run.name=x"),
        (".run.name=x", "write run.name=x"),
        ("engine.urls=[http://a:1", "close what is open"),
        ("engine.env={a: 1", "close what is open"),
        ("run.name='x", "close what is open"),
        ("--trainer.lr=1", "write trainer.lr=1"),
        ("--run.name", "write run.name=VALUE"),
        ("engine.urls[0]=x", "write engine.urls=x, the list as a whole"),
        ("run.name = x", "write run.name=x"),
        ("model.path=${run.name", "close what is open"),
    ],
)
def test_an_override_that_is_none_is_named_with_what_is_right(override: str, remedy: str) -> None:
    said = fails(override)
    assert f"override {override!r}" in said
    assert remedy in said
    assert len(said.splitlines()) == 1


def test_all_wrong_overrides_are_told_at_once_and_wrong_values_with_them() -> None:
    lines = fails("trainer.total_steps", "=5", "rollout.n=0", "rolout.min_n=2").splitlines()
    assert len(lines) == 4
    assert [line for line in lines if "rollout.n is 0" in line]


@pytest.mark.parametrize(
    "key",
    [
        "gateway.groups.within_s",
        "pool.default.group_deadline_s",
        "engine.hang_timeout_s",
        "backend.lr",
    ],
)
def test_a_number_without_bounds_is_none(key: str) -> None:
    said = fails(f"{key}=.inf")
    assert f"{key} is .inf" in said
    assert len(said.splitlines()) == 1


def test_an_option_with_dashes_is_told_by_the_command_line_too() -> None:
    done = command("config", "--config", "quickstart", "--trainer.lr=1", "rollout.n=0")
    assert done.returncode == 2
    assert "override '--trainer.lr=1' is malformed; write trainer.lr=1" in done.stderr
    assert "rollout.n is 0" in done.stderr


def test_overrides_may_stand_before_and_after_options() -> None:
    done = command("config", "run.name=x", "--config", "quickstart", "rollout.n=3")
    assert done.returncode == 0, done.stderr
    assert "name: x" in done.stdout
    assert "'n': 3" in done.stdout


# --- wrong values ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("rollout.n=0", "rollout.n is 0; it should be greater than or equal to 1"),
        ("run.name=42", "in quotes: run.name='\"42\"'"),
        ("run.name=1e3", "run.name is 1e3; it should be text, in quotes: run.name='\"1e3\"'"),
        ("run.name=..", "run.name: is '..', which is another folder"),
        ("run.name=on", "in quotes: run.name='\"on\"'"),
        ("model.revision=00123456", "in quotes: model.revision='\"00123456\"'"),
        ("run.name=caf\udce9", "override 'run.name=caf\\udce9' is no UTF-8; rename"),
        ("engine.urls=[1]", 'engine.urls.0 is 1; it should be text, in quotes: "1"'),
        ("run.name=a b", "run.name is 'a b'; it should match pattern"),
        ("async_training.mode=asink", "did you mean 'async'?"),
        ("data.train.kind=parket", "did you mean 'parquet'?"),
        ("run.seed=one", "run.seed is 'one'; it should be a valid integer"),
        ("run.seed=4294967296", "run.seed is 4294967296; it should be less than or equal to"),
        ("engine.seed=4294967296", "engine.seed is 4294967296; it should be less than or equal"),
        ("run.resume=no", "run.resume is no; it should be auto, never, a step or a path"),
        ("trainer.total_steps=yes", "trainer.total_steps is yes; it should be a valid integer"),
        ("backend.lr=on", "backend.lr is on; it should be a valid number"),
        ("logging.project=team/mine", "logging.project: is 'team/mine', and wandb takes no /"),
        ("rollout=null", "rollout is null; it should be a section"),
        ("rollout=3", "rollout is 3; it should be a section"),
        ("backend.betas=[0.9]", "backend.betas"),
        ("model.path=${modl.path}", "model.path: Interpolation key 'modl.path' not found"),
        ("model.path=???", "model.path: Missing mandatory value"),
        ("stepwell.dir=x", "stepwell is not a known key"),
        ("rollout.harness.preset=[a]", "rollout.harness.preset is ['a']; it should be text"),
        ("rollout.harness={preset: codex, env: [1]}", "harness.env is [1]; it should be a mapping"),
    ],
)
def test_a_wrong_value_is_one_line_with_key_value_and_bound(override: str, said: str) -> None:
    message = fails(override)
    assert said in message
    assert len(message.splitlines()) == 1


def test_what_may_be_several_things_is_one_line_with_all_of_them() -> None:
    said = fails("run.resume=-1")
    assert len(said.splitlines()) == 1
    assert "run.resume is -1; it should be 'auto' or 'never', or greater than or equal to 0" in said


# --- files that are none ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("run: {name: x\n", "line 2"),
        ("run: x\nrun: y\n", "duplicate key"),
        ("- run\n- model\n", "holds a list; write a mapping of sections"),
        ("5\n", "write a mapping of sections"),
        ("", "holds nothing; write a mapping of sections"),
        ("run:\n\tname: x\n", "line 2"),
        ("run:\n\tname: x\n", "indent with spaces: YAML takes no tabs"),
        ("a: &a [*a]\n", "a.yaml: "),
        ("run: {\n  name: ${oc.env:A} }\n", 'inside { } or [ ] quote it: "${oc.env:A}"'),
        ("run: [${run.dir}, '${a}']\n", 'inside { } or [ ] quote it: "${run.dir}"'),
    ],
)
def test_a_file_that_is_no_mapping_is_told_in_one_line(
    tmp_path: Path, text: str, said: str
) -> None:
    (tmp_path / "a.yaml").write_text(text)
    message = fails(config=str(tmp_path / "a.yaml"))
    assert message.startswith(f"{tmp_path / 'a.yaml'}: ")
    assert said in message
    assert len(message.splitlines()) == 1


def test_what_is_quoted_is_not_told_to_be_quoted(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("run: {name: '${run.dir}', a: b: c}\n")
    assert "quote it" not in fails(config=str(tmp_path / "a.yaml"))


def test_a_missing_file_a_folder_and_bytes_are_told_in_one_line(tmp_path: Path) -> None:
    assert f"--config is '{tmp_path}', a folder; name a YAML file" in fails(config=str(tmp_path))
    missing = str(tmp_path / "no.yaml")
    assert f"--config is {missing!r}: no such file" in fails(config=missing)
    (tmp_path / "b.yaml").write_bytes(b"\xff\xfe\x00")
    assert len(fails(config=str(tmp_path / "b.yaml")).splitlines()) == 1


@pytest.mark.parametrize(
    ("url", "named"),
    [
        ("localhost:1", "http://host:port"),
        ("http://localhost:99999", "http://host:port"),
        ("http://me:hushed@10.0.0.1:1", "user name or password"),
        ("me:hushed@10.0.0.1:1", "user name or password"),
    ],
)
def test_an_engines_url_that_cannot_be_used_is_refused_without_its_password(
    url: str, named: str
) -> None:
    said = fails("engine.kind=attach", f"engine.urls=['{url}']")
    assert "engine.urls" in said
    assert named in said
    assert "hushed" not in said
    assert len(said.splitlines()) == 1


def test_a_group_that_is_too_small_is_told_by_the_key_that_was_given() -> None:
    assert fails("rollout.n=1").startswith("rollout.n is 1, but a group needs rollout.min_n = 2 ")
    assert load_config("quickstart", ["rollout.n=1", "rollout.min_n=1"]).rollout.n == 1


@pytest.mark.parametrize("value", ["my file #1", "#1", "[a, b] # both"])
def test_what_yaml_takes_for_a_comment_is_not_cut_off_in_silence(value: str) -> None:
    assert "holds a comment: YAML leaves out #" in fails(f"rollout.stop={value}")


def test_a_number_sign_that_begins_no_comment_is_text() -> None:
    chosen = ["rollout.stop=['# a', 'b #c']", "run.dir=a#1 "]
    config = load_config("quickstart", chosen, here=False)
    assert config.rollout.stop == ("# a", "b #c")
    assert str(config.run.dir) == "a#1"
