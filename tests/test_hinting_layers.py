"""Layers: who is asked when, what is counted, what can be left out."""

from __future__ import annotations

import subprocess
import sys

import pytest

from composer_prime_plugin.errors import ConfigError
from composer_trl_host.hinting import JudgeHints, LayeredHints, RuleHints, TemplateHints, default_layered
from composer_trl_host.hints import ErrorContext, Hint, HintGenerator

NAMED = ErrorContext("missing_file", "cat: a.py: No such file or directory", "cat a.py")
UNNAMED = ErrorContext("missing_file", "It is not there.", "open it")


class Says:
    """Gives ``answer``, or raises it, and counts how often it was asked."""

    def __init__(self, answer):
        self.answer = answer
        self.asked = 0

    def generate(self, context):
        self.asked += 1
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def test_rules_come_before_the_judge_and_templates_stand_last():
    own = Says(Hint("Look.", "judge/missing_file"))
    layered = default_layered(own)
    assert [name for name, _ in layered.layers] == ["rule", "judge", "template"]
    assert layered.generate(NAMED).source == "rule/missing_path"
    assert own.asked == 0
    assert layered.generate(UNNAMED).source == "judge/missing_file"
    own.answer = None
    assert layered.generate(UNNAMED).source == "template/missing_file"
    assert layered.failures == {}
    assert layered.answered == {"rule/missing_path": 1, "judge/missing_file": 1, "template/missing_file": 1}


def test_a_task_s_own_hints_come_first():
    layered = default_layered(first=[("task", Says(Hint("Do it.", "task/x")))])
    assert layered.generate(NAMED) == Hint("Do it.", "task/x")
    assert isinstance(layered, HintGenerator)
    assert layered.as_collator_hook()(NAMED) == Hint("Do it.", "task/x")


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (RuntimeError("no"), "raised RuntimeError"),
        (TimeoutError(), "raised TimeoutError"),
        (Hint(" \n", "own"), "empty hint"),
        (Hint("word " * 200, "own"), "hint too long"),
        ("plain text", "gave str, no Hint"),
        (Hint(None, "own"), "raised AttributeError"),
    ],
)
def test_a_layer_that_fails_is_counted_and_the_next_is_asked(answer, reason):
    layered = LayeredHints([("own", Says(answer)), ("template", TemplateHints())])
    for _ in range(2):
        assert layered.generate(UNNAMED).source == "template/missing_file"
    assert layered.failures == {("own", reason): 2}


def test_an_interrupt_is_no_failure_of_a_layer():
    class Interrupted:
        def generate(self, context):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        LayeredHints([("own", Interrupted())]).generate(UNNAMED)


def test_the_cap_is_in_tokens_of_the_tokenizer_where_there_is_one():
    five = Hint("one two three four five", "own")
    layers = [("own", Says(five))]
    words = LayeredHints(layers, max_hint_tokens=5, count_tokens=lambda text: len(text.split()))
    assert words.generate(UNNAMED) == five
    assert LayeredHints(layers, max_hint_tokens=5).generate(UNNAMED) is None


@pytest.mark.parametrize(
    ("without", "source"),
    [
        (["rule/missing_path"], "template/missing_file"),
        (["rule"], "template/missing_file"),
        (["template/missing_file"], "rule/missing_path"),
        (["rule/missing_path", "template/missing_file"], None),
        (["rule", "template"], None),
    ],
)
def test_a_source_or_a_layer_can_be_left_out(without, source):
    hint = default_layered(without=without).generate(NAMED)
    assert (hint and hint.source) == source


def test_a_judge_that_is_left_out_is_not_asked():
    own = Says(Hint("Look.", "judge/missing_file"))
    assert (
        default_layered(own, without=["judge/missing_file"]).generate(UNNAMED).source.startswith("template")
    )
    assert default_layered(own, without=["judge"]).generate(UNNAMED).source.startswith("template")
    assert own.asked == 0


def test_a_rule_that_is_left_out_gives_way_to_the_next_layer_not_to_the_run():
    layered = default_layered(without=["rule/missing_path"])
    assert layered.generate(NAMED).source == "template/missing_file"
    assert layered.answered == {"template/missing_file": 1}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LayeredHints([], max_hint_tokens=0), r"max_hint_tokens must be at least 1; found 0"),
        (
            lambda: LayeredHints([("a", RuleHints()), ("a", RuleHints())]),
            r"distinct names; found \['a', 'a'\]; rename",
        ),
        (lambda: LayeredHints([("own", object())]), r"must have generate\(context\); own lacks it"),
        (
            lambda: default_layered(model="m"),
            r"judge's options need an openai.OpenAI .* found NoneType with model",
        ),
        (lambda: default_layered(Says(None), model="m"), r"found Says with model"),
        (lambda: default_layered(object()), r"the judge must have a model; found none"),
        (lambda: default_layered(object(), model="m"), r"client must be an openai.OpenAI; found object"),
        (lambda: JudgeHints(object(), "m"), r"client must be an openai.OpenAI; found object"),
    ],
)
def test_what_cannot_be_is_said_at_once(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def test_importing_needs_neither_torch_nor_the_judge_s_client():
    code = (
        "import sys; from composer_trl_host.hinting import default_layered; default_layered();"
        "print([name for name in ('torch', 'trl', 'transformers', 'openai') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
