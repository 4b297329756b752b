"""How an SDPO step's cost grows with the sites of a row and with the row's length.

    python bench/scaling.py --only sites [--counts 1 2 4 8]
    python bench/scaling.py --only time memory [--lengths 256 512 1024 2048]

- ``sites``: the same recovery and hint tokens shared between more sites of a row. A further site adds its
  own tokens alone: the generation prompt, and the token before the hint, which the teacher reads again. The
  step must grow by less, relatively, than the tokens that the teacher reads; both growths are printed.
- ``time`` and ``memory``: rows of more tokens, the recovery as before, at their end. SDPO's extra is the
  step's seconds, or its peak memory in a fresh process (as in ``bench/memory.py``), less those with
  ``sdpo.weight = 0``. It must not grow with the row. The teacher attends to all of the row, so its
  attention and a copy of the row's keys and values do; their bytes are printed beside the extra.

Both sides of a difference are taken in turn; medians over rounds.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from measuring import (
    OFF,
    ON,
    Record,
    Row,
    Shape,
    add_shape_arguments,
    growth,
    in_turn,
    load,
    make_batch,
    parser_of,
    ratios,
    seconds,
    shape_of,
    teacher_tokens,
)
from memory import MIB, Processes, fresh

from composer_trl_host.compose import compose_loss

PARTS = ("sites", "time", "memory")
COUNTS = (1, 2, 4, 8)
LENGTHS = (256, 512, 1024, 2048)
OF_SITES = Shape(rows=2)
OF_LENGTHS = Shape(rows=1, prompt=64)


def rise(first: Sequence[float], last: Sequence[float]) -> float:
    """Between medians: one round's difference of two long steps is mostly noise."""
    return statistics.median(last) - statistics.median(first)


def step_calls(model: Any, batches: dict[str, dict[str, Any]], offs: Sequence[str]) -> dict[str, Any]:
    """Timed steps of each batch with SDPO, and without it of those in ``offs``."""
    calls: dict[str, Any] = {}
    for name, batch in batches.items():
        for config, wanted in ((OFF, name in offs), (ON, True)):
            if wanted:
                side = "off" if config is OFF else "on"
                calls[f"{side} {name}"] = lambda batch=batch, config=config: seconds(
                    model, lambda: compose_loss(model, batch, config).loss
                )
    return calls


def sites(model: Any, shape: Shape, counts: Sequence[int], rounds: int) -> list[Row]:
    """Per count the ratio to the step without SDPO, then how much the step grew over the fewest sites."""
    shapes = {str(count): replace(shape, sites=count) for count in counts}
    batches = {name: make_batch(each, model.config.vocab_size) for name, each in shapes.items()}
    read = {name: teacher_tokens(batch) for name, batch in batches.items()}
    first, last = str(counts[0]), str(counts[-1])
    taken = in_turn(step_calls(model, batches, [first]), rounds)
    off = taken[f"off {first}"]
    rows = [
        Row(
            f"{name} sites",
            f"SDPO over sdpo.weight = 0, the teacher reads {read[name]} tokens",
            ratios(taken[f"on {name}"], off),
            shapes[name],
            details={"teacher_tokens": read[name], "seconds": taken[f"on {name}"], "seconds_off": off},
        )
        for name in shapes
    ]
    tokens = growth([read[first], read[last]])
    step = [value - 1.0 for value in ratios(taken[f"on {last}"], taken[f"on {first}"])]
    extra = [
        growth([on_first - base, on_last - base])
        for on_first, on_last, base in zip(taken[f"on {first}"], taken[f"on {last}"], off, strict=True)
    ]
    details = {"teacher_tokens_growth": tokens, "extra_growth": extra}
    says = f"the step from {first} to {last} sites; the teacher's tokens grow by {tokens:.3f}"
    rows.append(Row("growth of the step", says, step, shape, "of itself", target=tokens, details=details))
    says = f"SDPO's extra seconds from {first} to {last} sites"
    rows.append(Row("growth of the extra", says, extra, shape, "of itself", details=details))
    return rows


def at_lengths(shape: Shape, lengths: Sequence[int]) -> dict[str, Shape]:
    """``shape`` with its completion cut or drawn out so that a row has each length."""
    return {str(length): replace(shape, completion=length - shape.prompt) for length in lengths}


def prefix_bytes(model: Any, shape: Shape) -> int:
    """Of one copy of the keys and values that the teacher's sites attend to, in float32."""
    config = model.config
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    columns = int(make_batch(shape, config.vocab_size)["student_prefix"].max()) - 1
    per_column = 2 * config.num_hidden_layers * config.num_key_value_heads * head * 4
    return shape.rows * shape.sites * columns * per_column


def length_rows(
    kind: str, unit: str, shapes: dict[str, Shape], taken: dict[str, list[float]], model: Any
) -> list[Row]:
    """Per length the extra, and then what it grows by from the shortest row to the longest."""
    rows: list[Row] = []
    for name, shape in shapes.items():
        on, off = taken[f"on {name}"], taken[f"off {name}"]
        extra = [mine - base for mine, base in zip(on, off, strict=True)]
        prefix = prefix_bytes(model, shape) / MIB
        says = f"SDPO's extra over {statistics.median(off):.2f} {unit}; the row's keys and values {prefix:.0f} MiB"
        details = {"on": on, "off": off, "prefix_mib": prefix}
        rows.append(Row(f"{kind}, T {name}", says, extra, shape, unit, details=details))
    first, last = min(shapes, key=int), max(shapes, key=int)
    grown, base = rise(rows[0].values, rows[-1].values), rise(taken[f"off {first}"], taken[f"off {last}"])
    says = f"what the extra grows by from T {first} to {last}, the step without SDPO by {base:.2f} {unit}"
    details = {"without_sdpo": base, "share": grown / base}
    return [*rows, Row(f"{kind}, growth", says, [grown], None, unit, details=details)]


def time_of_lengths(model: Any, shape: Shape, lengths: Sequence[int], rounds: int) -> list[Row]:
    shapes = at_lengths(shape, lengths)
    batches = {name: make_batch(each, model.config.vocab_size) for name, each in shapes.items()}
    read = {teacher_tokens(batch) for batch in batches.values()}
    if len(read) != 1:
        raise SystemExit(f"the teacher must read the same tokens at every length; found {sorted(read)}")
    taken = in_turn(step_calls(model, batches, list(batches)), rounds)
    return length_rows("time", "s", shapes, taken, model)


def memory_of_lengths(
    name: str | None, model: Any, shape: Shape, lengths: Sequence[int], rounds: int, start: Any = fresh
) -> list[Row]:
    taken: dict[str, list[float]] = {}
    shapes = at_lengths(shape, lengths)
    for length, each in shapes.items():
        processes = Processes(name, each, start)
        calls = {side: (lambda side=side, p=processes: p.added(side) / MIB) for side in ("off", "on")}
        taken.update(
            {f"{side} {length}": values for side, values in in_turn(calls, rounds, warm=False).items()}
        )
    return length_rows("memory", "MiB", shapes, taken, model)


def main() -> None:
    parser = parser_of(__doc__, PARTS, 3)
    add_shape_arguments(parser)
    parser.add_argument("--counts", type=int, nargs="+", default=list(COUNTS), help="sites per row")
    parser.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS), help="tokens per row")
    parser.add_argument(
        "--rounds-of-memory", type=int, default=1, help="fresh processes per side (default 1)"
    )
    arguments = parser.parse_args()
    model, name = load(arguments.model)
    record = Record("scaling", name, model.num_parameters())
    many, long = shape_of(arguments, OF_SITES), shape_of(arguments, OF_LENGTHS)
    for part in arguments.only:
        print(f"{part}: {many if part == 'sites' else long}")
        if part == "sites":
            rows = sites(model, many, arguments.counts, arguments.pairs)
        elif part == "time":
            rows = time_of_lengths(model, long, arguments.lengths, arguments.pairs)
        else:
            rounds = arguments.rounds_of_memory
            rows = memory_of_lengths(arguments.model, model, long, arguments.lengths, rounds)
        for row in rows:
            record.add(row)
    record.write(arguments.json)


if __name__ == "__main__":
    main()
