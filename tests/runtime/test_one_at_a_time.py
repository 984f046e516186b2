"""Threads that rewrite and load at once get what they would get alone, and leave the process as it was."""

from __future__ import annotations

import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import torch
from support.own_models import Own

import retrofit
from retrofit.program.tracing_contexts import silence_tracer

IDS = torch.arange(7)[None]


def test_a_second_thread_waits_until_the_first_has_put_the_streams_back():
    streams = sys.stdout, sys.stderr
    inside, leave, seen = threading.Event(), threading.Event(), []

    def first():
        with silence_tracer():
            inside.set()
            leave.wait(10)

    def second():
        inside.wait(10)
        with silence_tracer():
            seen.append(leave.is_set())

    threads = [threading.Thread(target=one) for one in (first, second)]
    for thread in threads:
        thread.start()
    inside.wait(10)
    threads[1].join(0.2)  # it has had the time to enter, and has not
    leave.set()
    for thread in threads:
        thread.join(10)
    assert seen == [True]
    assert (sys.stdout, sys.stderr) == streams


def rewritten(seed, folder):
    with torch.random.fork_rng():  # one generator for all threads: the weights are set, not drawn
        model = Own(width=8, depth=2).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator) / 8)
    retrofit.apply(model, "altup(k=2)", example_inputs={"x": IDS}, verify=False)
    torch.save(model.state_dict(), folder / f"{seed}.pt")
    loaded = retrofit.load(folder / f"{seed}.pt", build=lambda: model)
    return loaded(IDS)


def test_threads_rewrite_and_load_as_one_does_alone(tmp_path):
    streams = sys.stdout, sys.stderr
    expected = [rewritten(seed, tmp_path) for seed in range(4)]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(rewritten, range(4), [tmp_path] * 4))
    assert all(map(torch.equal, found, expected))
    assert (sys.stdout, sys.stderr) == streams
