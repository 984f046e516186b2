"""Sweeps: what there is to assess, one by one in worker processes under a time limit, kept as it comes, and a page made of it."""

from __future__ import annotations

import argparse
import contextlib
import csv
import dataclasses
import io
import itertools
import json
import multiprocessing
import re
import tempfile
import time
import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

LONG = 40  # rows: a longer table is data

Row = dict[str, Any]
Task = tuple[str, str]  # what is assessed, and under which pass if one
Find = Callable[[Task], Row]
Failed = Callable[[Task, str], Row]  # the row of a task whose worker died or took too long


def not_done(task: Task, why: str) -> Row:
    """The row of a task whose worker died or took too long."""
    return {"cell": f"no: {why}"}


def sweep(
    tasks: Sequence[Task],
    find: Find,
    page: Callable[[dict[str, Row]], str],
    options: argparse.Namespace,
    failed: Failed = not_done,
) -> int:
    """What `--only` selects and has no result yet is assessed; after each task the results and the page are whole on disk."""
    results: dict[str, Row] = json.loads(options.results.read_text()) if options.results.exists() else {}
    waiting = [task for task in tasks if re.search(options.only, key(task)) and (options.again or key(task) not in results)]
    started = time.monotonic()
    for count, (task, found) in enumerate(assessed(waiting, options.jobs, options.limit, find, failed), start=1):
        results[key(task)] = found
        write_whole(options.results, json.dumps(results, indent=1, ensure_ascii=False))
        write_page(options.output, page(results))
        print(f"[{count}/{len(waiting)} {time.monotonic() - started:.0f} s] {key(task)} {found}", flush=True)
        if time.monotonic() - started > 60 * options.minutes:
            break
    write_page(options.output, page(results))
    return 0


def parser_of(description: str, name: str) -> argparse.ArgumentParser:
    """The options of a script that writes `benchmarks/results/name.json`."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--only", default="", metavar="PATTERN", help="tasks that the pattern matches: 'causal/llama', 'altup$'")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="worker processes")
    parser.add_argument("--limit", type=float, default=300.0, metavar="SECONDS", help="time limit of one task")
    parser.add_argument("--minutes", type=float, default=float("inf"), metavar="N", help="begin no further one after so long")
    parser.add_argument("--again", action="store_true", help="assess anew what has a result already")
    parser.add_argument("--results", type=Path, default=Path(f"build/{name}.json"), help="where results are kept between runs")
    parser.add_argument(
        "-o", "--output", type=Path, default=Path(f"benchmarks/results/{name}.json"), help="the page, as JSON or Markdown"
    )
    return parser


def key(task: Task) -> str:
    """What a task is called."""
    return " | ".join(filter(None, task))


def all_ids() -> list[str]:
    """Every architecture of the zoo."""
    from support import zoo

    return [entry.id for entry in zoo.entries()]


def in_mixed_order(names: Sequence[str]) -> list[str]:
    """The names in an order that is the same in every run and mixes what they are for: a sweep that stops early has a sample."""
    return sorted(names, key=lambda name: zlib.crc32(name.encode()))


@dataclasses.dataclass
class Worker:
    """A process that assesses one architecture after another."""

    process: multiprocessing.process.BaseProcess
    pipe: Connection
    task: Task | None = None
    since: float = 0.0

    @classmethod
    def start(cls, find: Find) -> Worker:
        here, there = multiprocessing.Pipe()
        process = multiprocessing.get_context("spawn").Process(target=answer, args=(there, find), daemon=True)
        process.start()
        there.close()
        return cls(process, here)

    def give(self, task: Task) -> None:
        self.task, self.since = task, time.monotonic()
        self.pipe.send(task)

    def stop(self) -> None:
        """The process has ended: by a request where it waits for work, else it is killed."""
        with contextlib.suppress(OSError):
            self.pipe.send(None)
        self.process.join(0 if self.task else 5)
        self.process.kill()
        self.process.join()
        self.pipe.close()


def answer(pipe: Connection, find: Find) -> None:
    """To every task that comes in by `pipe` goes out what `find` makes of it; None ends it."""
    warnings.filterwarnings("ignore")
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    with contextlib.suppress(EOFError, OSError):  # nobody is left to answer to
        while task := pipe.recv():
            pipe.send(find(task))


def assessed(tasks: Sequence[Task], jobs: int, limit: float, find: Find, failed: Failed) -> Iterator[tuple[Task, Row]]:
    """Each task with what was found, as they are done; a worker that dies or takes too long costs its own task only."""
    queue = list(reversed(tasks))
    workers: list[Worker] = []
    try:
        while queue or workers:
            while queue and len(workers) < jobs:
                workers.append(Worker.start(find))
                workers[-1].give(queue.pop())
            ready = wait([worker.pipe for worker in workers], timeout=1.0)
            for worker in list(workers):
                elapsed = time.monotonic() - worker.since
                assert worker.task is not None
                if worker.pipe in ready:
                    row = received(worker, failed)
                elif elapsed > limit:
                    row = failed(worker.task, f"took more than {limit:.0f} s")
                else:
                    continue
                alive = row.pop("alive", False)
                row["seconds"] = round(elapsed, 1)
                yield worker.task, row
                if alive:
                    worker.task = None
                if alive and queue:
                    worker.give(queue.pop())
                else:
                    worker.stop()
                    workers.remove(worker)
    finally:
        for worker in workers:
            worker.stop()


def received(worker: Worker, failed: Failed) -> Row:
    try:
        return {**worker.pipe.recv(), "alive": True}
    except EOFError:
        worker.process.join()
        assert worker.task is not None
        return failed(worker.task, f"the process ended with exit code {worker.process.exitcode}")


def write_whole(path: Path, text: str) -> None:
    """`path` holds `text`, never a part of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def write_page(path: Path, text: str) -> None:
    """Write a Markdown page; where `path` is a JSON file, as its blocks, with long tables as CSV files beside it."""
    if path.suffix != ".json":
        write_whole(path, text)
        return
    blocks: list[Row] = []
    section, name = "", path.stem
    for is_table, group in itertools.groupby(text.split("\n"), lambda row: row.startswith("|")):
        rows = list(group)
        if not is_table:
            section = next((row.strip("# ").lower() for row in reversed(rows) if row.startswith("#")), section)
            blocks += [{"text": "\n".join(rows).strip().split("\n")}] if any(rows) else []
            continue
        cells = [cells_of(row) for row in rows[:1] + rows[2:]]  # but for |---|
        if len(rows) <= LONG:
            blocks.append({"table": cells})
            continue
        if any(isinstance(block.get("table"), str) for block in blocks):  # not the first
            name = "_".join([path.stem, *re.findall(r"\w+", section)])
        made = io.StringIO()
        csv.writer(made, lineterminator="\n").writerows(cells)
        write_whole(path.with_name(f"{name}.csv"), made.getvalue())
        blocks.append({"table": f"{name}.csv"})
    write_whole(path, "[" + ",\n".join(map(one_a_line, blocks)) + "]\n")


def one_a_line(block: Row) -> str:
    """Return a block of a page as JSON, its lines or rows on lines of their own."""
    ((kind, items),) = block.items()
    made = [json.dumps(item, ensure_ascii=False) for item in ([items] if isinstance(items, str) else items)]
    return f'{{"{kind}": {made[0]}}}' if isinstance(items, str) else f'{{"{kind}": [\n  ' + ",\n  ".join(made) + "]}"


def read_page(path: Path) -> str:
    """Return the Markdown of a page that `write_page` wrote."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".json":
        return text
    blocks = ("\n".join(block["text"]) if "text" in block else table_of(block["table"], path.parent) for block in json.loads(text))
    return "\n\n".join([*blocks, ""])


def table_of(rows: str | Sequence[Sequence[str]], folder: Path) -> str:
    """Return rows, or those of a CSV file in `folder`, as a Markdown table."""
    if isinstance(rows, str):
        rows = list(csv.reader(io.StringIO((folder / rows).read_text(encoding="utf-8"))))
    return "\n".join(line([*map(escape, row)]) for row in (rows[0], ["---"] * len(rows[0]), *rows[1:]))


def with_tables(text: str, folder: Path) -> str:
    """Return the Markdown of a page in `folder`, in which links to CSV files on lines of their own are tables."""
    link = r"^\[[^\]\n]+\]\(([^)\n]+\.csv)\)$"
    return re.sub(link, lambda found: table_of(found[1], folder), text, flags=re.MULTILINE)


def cells_of(row: str) -> list[str]:
    """The texts in a row of a Markdown table."""
    return [part.strip().replace("\\|", "|").replace("&lt;", "<") for part in re.split(r"(?<!\\)\|", row.strip()[1:-1])]


def escape(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def cell(text: str) -> str:
    """`text` on one line of a table, not too long."""
    flat = escape(" ".join(text.split()))
    flat = re.sub(re.escape(tempfile.gettempdir()) + r"/[^\s:]*", "the saved model", flat)
    return flat if len(flat) <= 220 else flat[:219] + "…"
