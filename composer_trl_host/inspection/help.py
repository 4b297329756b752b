"""The help text of ``composer-rl inspect``. Imports nothing, so that showing it costs nothing."""

from __future__ import annotations

HELP = """\
usage: composer-rl inspect PATH [--html FILE] [--model NAME] [options]

Show, for recorded agent transcripts, every turn that answers a failed tool call: what failed, the hint that the
teacher would read there, how many tokens it would train, or why the site is left out. Trains nothing.

arguments:
  PATH                  a trace file, or a folder that is searched for them

options:
  --html FILE           write one self-contained page: conversations, hints and recovery tokens
  --model NAME          measure: a folder, a hub name, or "embedded"; reads student and teacher once per site
  --format NAME         auto (the default), claude-code, openai or verifiers
  --hint-role ROLE      user (the default), system or tool_result: the role of the hint's message
  --seq-len N           longest row in tokens; default: the model's own limit where it is measured, else none
  --include-rejected    also take turns that answer a call which a person refused
  --limit N             conversations on the page at most; the others are counted there
  --device NAME         where --model runs: cpu (the default), cuda, cuda:1

Without --model tokens are counted with the embedded model's tokenizer.

exit codes: 0 shown, 2 the input cannot be read

example:
  composer-rl inspect examples/traces --html sites.html --model embedded
"""
