"""The command line: routes, exit codes, one-line messages, and the hand-over to PRIME-RL."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import textwrap
import types
from pathlib import Path

import pytest

from composer_prime_plugin import __version__, cli
from composer_prime_plugin.contract import PRIME_LOSS_MODULE, BrokenPrimeRLError, LossContract
from composer_prime_plugin.errors import ConfigError, ModelError
from composer_prime_plugin.prime_schema import SchemaVerdict

CHANNEL_ONE = """
max_steps = 3

[trainer.loss]
type = "custom"
import_path = "composer_prime_plugin.loss_fn"
"""
SDPO = CHANNEL_ONE + "\n[trainer.loss.kwargs.sdpo]\nweight = 0.5\n"

PRIME = LossContract(fields=frozenset({"trainer_logprobs", "advantages"}), version="0.8.0")


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rl.toml").write_text(CHANNEL_ONE)
    (tmp_path / "sdpo.toml").write_text(SDPO)
    return tmp_path


@pytest.fixture
def prime_installed(monkeypatch) -> None:
    monkeypatch.setattr(cli, "_installed_contract", lambda: PRIME)


@pytest.fixture
def prime_absent(monkeypatch) -> None:
    monkeypatch.setattr(cli, "_installed_contract", lambda: None)
    monkeypatch.setattr(cli, "prime_is_importable", lambda: False)


@pytest.fixture
def host(monkeypatch) -> list:
    """A stand-in for the host; holds the runs it was given."""
    runs: list = []
    module = types.ModuleType(cli.HOST_MODULE)

    def run_host(run):
        runs.append(run)
        return 7

    module.run_host = run_host
    monkeypatch.setitem(sys.modules, cli.HOST_MODULE, module)
    return runs


def only_line(text: str) -> str:
    """The one line of ``text``, without the prefix that it must have."""
    assert text.startswith("composer-rl: ")
    assert text.count("\n") == 1
    assert text.endswith("\n")
    return text.removeprefix("composer-rl: ").rstrip()


def test_route_in_plain_text(folder, prime_installed, capsys):
    assert cli.main(["route", "@", "rl.toml", "--run.name", "two words"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "backend: prime-rl",
        "reason:  sdpo.weight = 0 needs channel 1 alone, and PRIME-RL 0.8.0 is installed",
        "command: rl @ rl.toml --run.name 'two words'",
    ]


@pytest.mark.parametrize("words", [["--json", "@", "sdpo.toml"], ["@", "sdpo.toml", "--json"]])
def test_route_as_json(folder, prime_installed, capsys, words):
    assert cli.main(["route", *words]) == 0
    fields = json.loads(capsys.readouterr().out)
    assert list(fields) == ["backend", "reasons", "command"]
    assert fields["backend"] == "trl-host"
    assert fields["command"] == "composer-rl run @ sdpo.toml"
    (reason,) = fields["reasons"]
    assert "sdpo.weight = 0.5 needs full-vocabulary logits" in reason


def test_the_command_of_a_route_is_the_users_own_words(folder, prime_absent, capsys):
    words = ["@", "sdpo.toml", "--run.name", "it's $HOME", "--trainer.optim.lr=1e-5"]
    cli.main(["route", *words, "--json"])
    command = json.loads(capsys.readouterr().out)["command"]
    assert shlex.split(command) == ["composer-rl", "run", *words]


def test_run_on_the_host_shows_the_route_and_returns_the_hosts_code(folder, prime_absent, host, capsys):
    assert cli.main(["run", "@", "sdpo.toml", "--max-steps", "5"]) == 7
    assert capsys.readouterr().out.startswith("backend: trl-host\nreason:  sdpo.weight = 0.5 needs")
    (run,) = host
    assert run.document["max_steps"] == 5
    assert run.arguments == ("@", "sdpo.toml", "--max-steps", "5")


def test_the_contract_is_read_off_the_installed_prime_rl(folder, monkeypatch, capsys):
    from composer_prime_plugin import contract

    module = types.ModuleType(PRIME_LOSS_MODULE)
    module.LossInputs = contract.LossInputs
    package = types.ModuleType("prime_rl")
    monkeypatch.setitem(sys.modules, "prime_rl", package)
    monkeypatch.setitem(sys.modules, PRIME_LOSS_MODULE, module)
    contract.prime_loss_module.cache_clear()
    try:
        assert cli.main(["route", "@", "sdpo.toml"]) == 0
    finally:
        contract.prime_loss_module.cache_clear()
    assert capsys.readouterr().out.startswith("backend: prime-rl\n")


def test_a_broken_prime_rl_is_one_sentence(folder, monkeypatch, capsys):
    def broken(cls):
        raise BrokenPrimeRLError("prime_rl is importable, so its loss module must be too; repair it")

    monkeypatch.setattr(LossContract, "installed", classmethod(broken))
    monkeypatch.setitem(sys.modules, "prime_rl", types.ModuleType("prime_rl"))
    assert cli.main(["route", "@", "rl.toml"]) == 2
    assert "repair it" in only_line(capsys.readouterr().err)


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (
            ["fly", "@", "rl.toml"],
            "the first word must be a command, run, route, inspect or export; found 'fly'",
        ),
        (["@", "rl.toml"], "found '@'"),
        (["run"], "needs a TOML"),
        (["run", "@", "gone.toml"], "'gone.toml'"),
        (["route", "@", "bad.toml"], "'bad.toml' must be a TOML"),
        (["run", "@", "rl.toml", "--trainer.loss.type", "default"], 'must be "custom"'),
        (["run", "@", "rl.toml", "--trainer.loss.import-path", "x.y"], "trainer.loss.import_path must be"),
        (["run", "@", "rl.toml", "--trainer.loss.kwargs.sdpo.x", "1"], "unknown key 'x'; valid keys are"),
        (["run", "@", "rl.toml", "--max-steps"], "--max-steps takes a value"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(folder, prime_absent, host, capsys, words, part):
    (folder / "bad.toml").write_text("not a toml")
    assert cli.main(words) == 2
    captured = capsys.readouterr()
    assert part in only_line(captured.err)
    assert captured.out == ""
    assert host == []


@pytest.mark.parametrize(
    ("verdict", "note"),
    [
        (SchemaVerdict(resolved={"max_steps": 3}), None),
        (SchemaVerdict(unable="no such taskset"), "no such taskset"),
    ],
)
def test_prime_rls_schema_is_asked_before_the_host_runs(
    folder, prime_installed, host, monkeypatch, capsys, verdict, note
):
    asked: list = []
    monkeypatch.setattr(cli, "prime_is_importable", lambda: True)
    monkeypatch.setattr(cli, "check_with_prime", lambda document: asked.append(document) or verdict)
    assert cli.main(["run", "@", "sdpo.toml"]) == 7
    (run,) = host
    assert asked == [run.document]
    printed = capsys.readouterr().out
    assert ("note:" in printed) == (note is not None)
    assert (note or "") in printed
    monkeypatch.setenv("RANK", "1")
    assert cli.main(["run", "@", "sdpo.toml"]) == 7
    assert len(asked) == 1


def test_what_prime_rls_schema_refuses_does_not_run(folder, prime_installed, host, monkeypatch, capsys):
    def refuse(document):
        raise ConfigError("PRIME-RL's own RLConfig must accept the TOML;\nit says: no")

    monkeypatch.setattr(cli, "prime_is_importable", lambda: True)
    monkeypatch.setattr(cli, "check_with_prime", refuse)
    for words in (["sdpo.toml"], ["sdpo.toml", "--dry-run"], ["rl.toml", "--dry-run"]):
        assert cli.main(["run", "@", *words]) == 2
        assert only_line(capsys.readouterr().err).endswith("it says: no")
    assert host == []
    assert not (folder / "outputs").exists()


def test_a_dry_run_starts_neither_backend(folder, prime_installed, host, monkeypatch, capsys):
    monkeypatch.setattr(cli, "prime_is_importable", lambda: True)
    monkeypatch.setattr(cli, "check_with_prime", lambda document: SchemaVerdict(resolved={"a": 1}))
    monkeypatch.setattr(cli, "_become_prime", lambda *words: pytest.fail("PRIME-RL was started"))
    for name, backend in (("rl.toml", "prime-rl"), ("sdpo.toml", "trl-host")):
        assert cli.main(["run", "@", name, "--dry-run", "--output-dir", f"out-{name}"]) == 0
        assert capsys.readouterr().out.startswith(f"backend: {backend}\n")
        assert json.loads((folder / f"out-{name}" / "configs" / "prime-rl.json").read_text()) == {"a": 1}
    assert host == []


def test_an_error_of_the_host_is_one_line(folder, prime_absent, host, monkeypatch, capsys):
    def fail(run):
        raise ModelError("a model folder must have a tokenizer;\nfound none")

    monkeypatch.setattr(sys.modules[cli.HOST_MODULE], "run_host", fail)
    assert cli.main(["run", "@", "rl.toml"]) == 2
    assert only_line(capsys.readouterr().err) == "a model folder must have a tokenizer; found none"


@pytest.mark.parametrize(
    ("error", "part"),
    [
        (ModuleNotFoundError("No module named 'trl'", name="trl"), "there is no module trl"),
        (ImportError("cannot import name 'X' from 'trl'"), "cannot import name 'X'"),
    ],
)
def test_a_missing_package_of_the_host_names_the_extra(
    folder, prime_absent, monkeypatch, capsys, error, part
):
    def import_module(name):
        raise error

    monkeypatch.setattr(cli.importlib, "import_module", import_module)
    assert cli.main(["run", "@", "rl.toml"]) == 2
    message = only_line(capsys.readouterr().err)
    assert part in message
    assert "pip install 'composer-rl[trl]'" in message


@pytest.mark.parametrize("words", [["@", "rl.toml"], ["@", "rl.toml", "--resume"]])
def test_an_interrupt_says_how_to_go_on(folder, prime_absent, host, monkeypatch, capsys, words):
    def interrupted(run):
        raise KeyboardInterrupt

    monkeypatch.setattr(sys.modules[cli.HOST_MODULE], "run_host", interrupted)
    assert cli.main(["run", *words]) == 130
    command = "composer-rl run " + " ".join(words)
    assert f"start again with `{command}`" in only_line(capsys.readouterr().err)


def test_version_and_help(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"composer-rl {__version__}\n"
    for words in (["--help"], ["run", "--help"], ["route", "@", "rl.toml", "-h"], ["export", "--help"]):
        assert cli.main(words) == 0
        text = capsys.readouterr().out
        assert text.startswith("usage: composer-rl ")
        assert "example:\n  composer-rl " in text
        assert max(map(len, text.splitlines())) <= 110
    assert cli.main([]) == 2


# The hand-over replaces the process, so it is tested in processes of its own. They get the contract
# put in, which spares each of them the import of torch.
STARTER = """
import sys, types
import composer_prime_plugin.cli as cli
cli._installed_contract = lambda: types.SimpleNamespace(version="0.8.0", has_logits=False, has_step=False)
sys.executable = "/nonexistent/python"
sys.exit(cli.main())
"""


def stand_in(folder: Path, code: str) -> dict[str, str]:
    """An environment whose PATH finds an executable `rl` that runs ``code``."""
    scripts = folder / "scripts"
    scripts.mkdir()
    executable = scripts / "rl"
    executable.write_text(f"#!{sys.executable}\n{textwrap.dedent(code)}")
    executable.chmod(0o755)
    return {**os.environ, "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}"}


def start(folder: Path, words: list[str], environment: dict[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", STARTER, *words],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_prime_rl_gets_the_very_same_words_and_its_exit_code_is_ours(folder):
    environment = stand_in(
        folder,
        """
        import json, os, sys
        print(json.dumps([sys.argv[1:], os.environ.get("MARK"), os.getpid()]))
        sys.exit(41)
        """,
    )
    words = ["@", "rl.toml", "--run.name", "two  words", "--trainer.optim.lr=1e-5", "--no-wandb", "--plain"]
    before = (folder / "rl.toml").read_bytes()
    process = start(folder, ["run", *words], {**environment, "MARK": "kept"})
    out, err = process.communicate(timeout=60)
    *route, last = out.splitlines()
    assert process.returncode == 41, err
    assert route[0] == "backend: prime-rl"
    assert route[-1] == f"command: rl {shlex.join(words)}"
    assert json.loads(last) == [words, "kept", process.pid]
    assert (folder / "rl.toml").read_bytes() == before
    assert sorted(path.name for path in folder.iterdir()) == ["rl.toml", "scripts", "sdpo.toml"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_signals_reach_prime_rl_once(folder, number):
    environment = stand_in(
        folder,
        """
        import signal, sys, time
        got = []
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda number, frame: got.append(number))
        print("ready", flush=True)
        while not got:
            time.sleep(0.01)
        time.sleep(0.2)
        print([int(number) for number in got])
        sys.exit(50 + got[0])
        """,
    )
    process = start(folder, ["run", "@", "rl.toml"], environment)
    assert process.stdout is not None
    while process.stdout.readline() != "ready\n":
        assert process.poll() is None
    process.send_signal(number)
    out, _ = process.communicate(timeout=60)
    assert out == f"[{int(number)}]\n"
    assert process.returncode == 50 + number


def test_a_prime_rl_that_dies_of_a_signal_dies_of_it_here(folder):
    environment = stand_in(folder, "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n")
    process = start(folder, ["run", "@", "rl.toml"], environment)
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL


def test_a_missing_or_broken_executable_is_one_sentence(folder, prime_installed, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    assert cli.main(["run", "@", "rl.toml"]) == 2
    assert "its executable `rl` must be" in only_line(capsys.readouterr().err)
    (folder / "rl").write_text("#!/nonexistent/interpreter\n")
    (folder / "rl").chmod(0o755)
    disposition = signal.getsignal(signal.SIGPIPE)
    try:
        assert cli.main(["run", "@", "rl.toml"]) == 2
    finally:
        signal.signal(signal.SIGPIPE, disposition)
    assert f"{folder / 'rl'} does not (No such file or directory)" in only_line(capsys.readouterr().err)


def test_the_executable_beside_the_interpreter_comes_first(folder, prime_installed, monkeypatch):
    for name in ("venv", "path"):
        (folder / name).mkdir()
        (folder / name / "rl").write_text("")
        (folder / name / "rl").chmod(0o755)
    monkeypatch.setenv("PATH", str(folder / "path"))
    monkeypatch.setattr(sys, "executable", str(folder / "venv" / "python"))
    disposition = signal.getsignal(signal.SIGPIPE)
    started: list = []

    def execve(executable, words, environment):
        started.append((executable, words))
        raise SystemExit

    monkeypatch.setattr(os, "execve", execve)
    try:
        with pytest.raises(SystemExit):
            cli.main(["run", "@", "rl.toml"])
    finally:
        signal.signal(signal.SIGPIPE, disposition)
    executable = str(folder / "venv" / "rl")
    assert started == [(executable, [executable, "@", "rl.toml"])]


def test_the_console_script_is_this_main():
    from importlib.metadata import entry_points

    (script,) = entry_points(group="console_scripts", name="composer-rl")
    assert script.load() is cli.main
