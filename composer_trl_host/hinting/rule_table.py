"""The shipped rules, special ones first."""

from __future__ import annotations

from composer_trl_host.hinting.rules import Rule
from composer_trl_host.hinting.rules_code import CATCH_ALL_RULES, CODE_RULES
from composer_trl_host.hinting.rules_system import SYSTEM_RULES
from composer_trl_host.hinting.rules_tools import TOOL_RULES

RULES: tuple[Rule, ...] = (*TOOL_RULES, *CODE_RULES, *SYSTEM_RULES, *CATCH_ALL_RULES)
