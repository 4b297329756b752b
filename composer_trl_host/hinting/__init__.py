"""Hints for failed tool calls: rules, a judge and templates, in layers."""

from composer_trl_host.hinting.judge import JudgeHints
from composer_trl_host.hinting.judge_options import JudgeOptions, build_judge
from composer_trl_host.hinting.layers import LayeredHints, default_layered
from composer_trl_host.hinting.rules import Rule, RuleHints, rule
from composer_trl_host.hinting.templates import KINDS, TEMPLATES, TemplateHints

__all__ = [
    "KINDS",
    "TEMPLATES",
    "JudgeHints",
    "JudgeOptions",
    "LayeredHints",
    "Rule",
    "RuleHints",
    "TemplateHints",
    "build_judge",
    "default_layered",
    "rule",
]
