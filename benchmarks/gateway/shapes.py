"""Costs of long conversations, streams and many agents at once.

long     20 turns to 64,000 tokens, one agent: gateway CPU of each turn
contexts 8 conversations that grow by 500 tokens a turn, at 12 to 60 k: CPU of a turn
coding   8 at 45 k as coding agents have them, and one alone: 20 tools in each request, streamed
short    short conversations of tool calls at 64 connections, and the same by the Responses API
stream   one agent, an event every 5 ms: when the text of each event is seen
events   16 agents, streams of 16 events as fast as they come: streams/s, CPU of an event
many     512 agents at once, 4,000 to 8,000 tokens: errors, event-loop delay, memory; six times
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import numpy as np
import orjson

from benchmarks.gateway.measure import GatewayBench, Sample, run_job
from benchmarks.gateway.process import resident_bytes
from benchmarks.gateway.systems import Direct, Gateway, Rllm
from benchmarks.gateway.workload import CALLING, CONTEXTS, GROWING, LONG_TURNS, ROLLOUTS
from benchmarks.system import paired

PAUSE_S = 0.05
"""Between the turns of a long conversation: what the gateway does after its answer is counted."""
INTERVAL_S = 0.005
EVENTS, STREAMS = 16, 16
"""Events of a stream, and streams at once."""
MANY_TURNS = 3
GROWING_TURNS = 6
WAVES = 6


async def long_conversations(bench: GatewayBench) -> None:
    report, ours = bench.report, bench.ours
    cpu_s: list[list[float]] = []
    for conversations in (1, bench.size.conversations):  # the first warms up
        job = bench.job(
            ours,
            "long",
            connections=1,
            prompts=conversations,
            rollouts=1,
            turns=LONG_TURNS,
            cpu_pid=ours.pids[0],
            pause_s=PAUSE_S,
        )
        cpu_s = (await bench.client.run(job)).cpu_s
        await ours.settle(job)
    by_turn = [1e3 * statistics.median(turn) for turn in zip(*cpu_s, strict=True)]
    ratio = statistics.median(turns[-1] / turns[1] for turns in cpu_s)
    report.at_most("last_turn_by_second_cpu", ratio, 2.0)
    report.figures["turns_of_3200_tokens"] = [
        {"turn": turn, "gateway_cpu_ms": by_turn[turn - 1]}
        for turn in (1, 2, 5, 10, 15, len(by_turn))
    ]


async def contexts(bench: GatewayBench) -> None:
    """Measure every system that is one process, `GROWING` conversations at once."""
    cpu_ms = {kind: await _growing(bench, kind, GROWING) for kind in CONTEXTS}
    bench.report.figures["growing_by_500_tokens_a_turn"] = [
        {"system": name, "context": kind, "cpu_ms": found}
        for kind, by_system in cpu_ms.items()
        for name, found in by_system.items()
    ]
    first, *_, last = (by_system[bench.ours.name] for by_system in cpu_ms.values())
    bench.report.at_most("cpu_ms_of_longest_context", last, 2.0)
    bench.report.at_most("longest_by_shortest_context_cpu", last / first, 3.5)


async def coding(bench: GatewayBench) -> None:
    """Measure every system that is one process, whole and streamed: `GROWING` conversations at
    once, and one that pauses after each turn, as an agent does while its tools run (a core that
    slept costs more)."""
    rows = []
    for connections in (1, GROWING):
        whole = await _growing(bench, "coding", connections)
        streamed = await _growing(bench, "coding", connections, stream=True)
        rows += [
            {
                "system": name,
                "conversations": connections,
                "cpu_ms": whole[name],
                "streamed_cpu_ms": streamed[name],
            }
            for name in whole
        ]
    bench.report.figures["coding_agents_at_45k"] = rows
    # Of the last: those at once.
    bench.report.at_most("cpu_ms_of_coding_streamed", streamed[bench.ours.name], 2.5)
    if Rllm.name in streamed:
        less = streamed[Rllm.name] / streamed[bench.ours.name]
        bench.report.at_least("rllm_cpu_by_coding_streamed", less, 4.0)


async def short_conversations(bench: GatewayBench) -> None:
    """Measure every system that is one process, taking turns; of the Responses API ours alone."""
    report, size, ours = bench.report, bench.size, bench.ours
    shapes: list[tuple[str, Gateway, str]] = [
        ("tools", system, system.path) for system in bench.systems if len(system.pids) == 1
    ]
    shapes.append(("responses", ours, ours.responses_path))
    samples: dict[tuple[str, str], list[Sample]] = defaultdict(list)
    most = max(size.connections)
    await bench.engine.control(answer="call")
    for turn in range(size.rounds + 1):  # the first warms up
        for kind, system, path in shapes:
            job = bench.job(
                system,
                kind,
                path=path,
                connections=most,
                prompts=size.groups,
                first_prompt=turn * size.groups,
            )
            found, _ = await run_job(bench, system, job)
            await system.settle(job)
            if turn:
                samples[kind, system.name].append(found)
    await bench.engine.control()
    report.figures[f"short_conversations_of_tool_calls_at_{most}"] = [
        {
            "kind": kind,
            "system": name,
            "requests_per_s": statistics.median(s.requests_per_s for s in found),
            "cpu_ms": statistics.median(s.cpu_ms for s in found),
        }
        for (kind, name), found in samples.items()
    ]
    for kind in CALLING:
        cpu_ms = statistics.median(s.cpu_ms for s in samples[kind, ours.name])
        report.at_most(f"cpu_ms_of_short_{kind}_at_{most}", cpu_ms, 0.6)


async def _growing(
    bench: GatewayBench, kind: str, connections: int, *, stream: bool = False
) -> dict[str, float]:
    """CPU of a turn in milliseconds by system, taking turns; each conversation's first left out."""
    conversations = GROWING if bench.size.conversations > 1 else 1
    samples: dict[str, list[float]] = defaultdict(list)
    for turn in range(bench.size.rounds):
        for system in bench.systems:
            if len(system.pids) != 1:
                continue
            opening = bench.job(
                system,
                kind,
                connections=min(connections, conversations),
                prompts=conversations,
                first_prompt=turn * conversations,
                rollouts=1,
                turns=1,
                stream=stream,
                complete_path=None,
                pause_s=PAUSE_S / 5 if connections == 1 else 0.0,
            )
            await run_job(bench, system, opening)
            growing = replace(
                opening, first_turn=1, turns=GROWING_TURNS, complete_path=system.complete_path
            )
            found, _ = await run_job(bench, system, growing)
            await system.settle(growing)
            samples[system.name].append(found.cpu_ms)
    return {name: statistics.median(found) for name, found in samples.items()}


async def streams(bench: GatewayBench) -> None:
    """Every system's streams, taking turns."""
    report, lengths = bench.report, _lengths(bench)
    first_ms: dict[str, list[float]] = defaultdict(list)
    lag_ms: dict[str, list[float]] = defaultdict(list)
    in_time: dict[str, list[bool]] = defaultdict(list)
    """True for each event but the last if its text was seen before the next was written."""
    await bench.engine.control(interval_s=INTERVAL_S)
    for turn in range(bench.size.rounds):
        for system in bench.systems:
            job = bench.job(
                system,
                "chat",
                connections=1,
                prompts=1,
                rollouts=1,
                stream=True,
                first_prompt=turn,
            )
            result = await bench.client.run(job)
            emitted = await bench.engine.control(interval_s=INTERVAL_S)
            await system.settle(job)
            for sent, seen, written in zip(result.sent, result.seen, emitted, strict=True):
                at = _arrivals(seen, lengths)
                first_ms[system.name].append(1e3 * (at[0] - sent))
                lag_ms[system.name] += [1e3 * (a - w) for a, w in zip(at, written, strict=False)]
                in_time[system.name] += [a < w for a, w in zip(at, written[1:], strict=True)]
    await bench.engine.control()
    added = {
        name: statistics.median(first) - statistics.median(first_ms[Direct.name])
        for name, first in first_ms.items()
    }
    report.figures["streams_of_an_event_every_5_ms"] = [
        {
            "system": name,
            "first_token_ms": statistics.median(first),
            "first_token_added_ms": added[name],
            "chunk_lag_p99_ms": float(np.percentile(lag_ms[name], 99)),
            "seen_before_the_next": statistics.mean(in_time[name]),
        }
        for name, first in first_ms.items()
    ]
    mine = bench.ours.name
    report.at_most("first_token_added_ms", added[mine], 3.0)
    report.at_least("chunks_seen_before_the_next", statistics.mean(in_time[mine]), 0.99)


async def events(bench: GatewayBench) -> None:
    """Measure every system that is one process, taking turns."""
    report, size = bench.report, bench.size
    systems = [system for system in bench.systems if len(system.pids) == 1]
    samples: dict[str, list[Sample]] = defaultdict(list)
    first_ms: dict[str, list[float]] = defaultdict(list)
    await bench.engine.control(n_events=EVENTS)
    for turn in range(size.rounds + 1):  # the first warms up
        for system in systems:
            options = {"connections": STREAMS, "prompts": size.groups, "stream": True}
            job = bench.job(system, "chat", first_prompt=turn * size.groups, **options)
            found, result = await run_job(bench, system, job)
            await system.settle(job)
            if turn:
                samples[system.name].append(found)
                pairs = zip(result.sent, result.seen, strict=True)
                first_ms[system.name] += [1e3 * (seen[0][0] - sent) for sent, seen in pairs]
    await bench.engine.control()
    report.figures[f"streams_of_{EVENTS}_events_at_{STREAMS}"] = [
        {
            "system": name,
            "streams_per_s": statistics.median(s.requests_per_s for s in found),
            "cpu_ms": statistics.median(s.cpu_ms for s in found),
            "cpu_us_an_event": statistics.median(1e3 * s.cpu_ms / EVENTS for s in found),
            "first_token_ms": statistics.median(first_ms[name]),
        }
        for name, found in samples.items()
    ]
    if Rllm.name in samples:
        mine, theirs = samples[bench.ours.name], samples[Rllm.name]
        ratio = paired(mine, theirs, lambda a, b: a.requests_per_s / b.requests_per_s)
        report.at_least(f"streams_by_rllm_at_{STREAMS}", ratio, 4.0)


def _lengths(bench: GatewayBench) -> list[int]:
    """Characters of the answer after each event that has text."""
    pieces = orjson.loads(bench.workload.answer_file.read_bytes())["text"]["pieces"]
    return list(accumulate(len(piece) for piece in pieces if piece))


def _arrivals(seen: Sequence[tuple[float, int]], lengths: Sequence[int]) -> list[float]:
    """Return the time at which the text of each event had arrived."""
    times = []
    at = iter(seen)
    now, n = next(at)
    for length in lengths:
        while n < length:
            now, n = next(at)
        times.append(now)
    return times


async def waves(bench: GatewayBench) -> None:
    """Every agent opens a connection of its own and runs one trajectory; six times."""
    report, ours, agents = bench.report, bench.ours, bench.size.agents
    rows, all_errors = [], []
    for k in range(WAVES):
        job = bench.job(
            ours,
            "many",
            connections=agents,
            prompts=agents // ROLLOUTS,
            turns=MANY_TURNS,
        )
        await ours.actors[0].watch.remote()
        result = await bench.client.attempt(job)
        late_s, _ = await ours.actors[0].stalls.remote()
        rss = sum(map(resident_bytes, ours.pids))  # when all was answered
        if not result.errors:
            await ours.settle(job)
        all_errors += result.errors
        late_p99, late_max = np.percentile(late_s, (99, 100)) * 1e3
        rows.append(
            {
                "wave": k + 1,
                "requests_per_s": len(result.latencies_s) / (result.ended - result.began),
                "p99_ms": float(np.percentile(result.latencies_s, 99)) * 1e3,
                "errors": len(result.errors),
                "loop_delay_p99_ms": float(late_p99),
                "loop_delay_max_ms": float(late_max),
                "gateway_rss_mb": rss / 2**20,
            }
        )
    report.figures[f"waves_of_{agents}_agents"] = rows
    if all_errors:
        report.figures["first_error"] = all_errors[0]
    report.zero(errors=len(all_errors))
    report.at_most("loop_delay_p99_ms", max(row["loop_delay_p99_ms"] for row in rows), 50.0)
    # The first ones leave caches and a heap of the size that the most calls in flight ever needed;
    # later ones must find that enough. The prompt ids of one wave, were they kept, would be 6 % of
    # the process.
    rss_mb = [row["gateway_rss_mb"] for row in rows]
    half = WAVES // 2
    report.at_most("rss_of_later_waves", max(rss_mb[half:]) / max(rss_mb[:half]), 1.03)
