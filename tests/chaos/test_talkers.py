"""The search for what clients saw notices what is missing."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path

import pytest

from stepwell.backends.base import TokenBatch
from stepwell.datapool.files.archive.reader import ArchiveReader
from stepwell.datapool.files.trained import trained_steps
from stepwell.datapool.remote.client import DataPoolClient
from stepwell.datapool.remote.stopped import stopped_pool
from stepwell.trainer.samples import Trained
from tests.builders import until
from tests.chaos.live import copies_in
from tests.chaos.talkers import FORGOTTEN, GAVE_UP, Talk, Talkers, bytes_of, missing
from tests.datapool.test_archive import Archived
from tests.ui.demo import archive_all, demo


@pytest.fixture
def run(tmp_path: Path) -> Archived:
    run = Archived(tmp_path)
    run.train("done", "What is wordone?", "It is 4.", 1.0)
    run.turn("gone", "What is wordtwo?", "No idea.")
    run.pool("abort_trajectory", "gone", GAVE_UP)
    run.pool("drop_group", "p-gone", "too few rollouts")
    run.archive()
    run.turn("open", "What is wordthree?", "Wait.")
    run.turn("waits", "What is wordfour?", "Later.")
    run.pool("abort_trajectory", "waits", GAVE_UP)
    run.pool("drop_group", "p-waits", "too few rollouts")
    run.pool.journal.close()
    return run


async def search(run: Archived, *talks: Talk) -> tuple[list[str], dict[str, int]]:
    pool = stopped_pool(run.path / "pool", run.pool.pool.config)
    return await missing(talks, pool, ArchiveReader(run.path / "archive"))


async def test_what_clients_saw_is_found_in_archive_and_pool(run: Archived) -> None:
    lines, places = await search(
        run,
        Talk("done", "u", ["wordone"], ["It is 4."], "complete", 1.0),
        Talk("gone", "u", ["wordtwo"], ["No idea."], "aborted"),
        Talk("open", "u", ["wordthree"], ["Wait."]),
        Talk("waits", "u", ["wordfour"], ["Later."], "aborted"),
    )
    assert lines == []
    assert places == {"archived": 2, "in the pool": 1, "waiting": 1}


@pytest.mark.parametrize(
    ("talk", "why"),
    [
        (Talk("nobody", "u", ["word"], ["reply"]), "it is nowhere"),
        (Talk("done", "u", ["wordone", "wordtwo"], [], "complete", 1.0), "lacks 'wordtwo'"),
        (Talk("done", "u", ["wordone"], ["It is 5."], "complete", 1.0), "lacks the reply"),
        (Talk("done", "u", ["wordone"], [], "complete", 0.0), "has the reward 1.0, not 0.0"),
        (Talk("done", "u", ["wordone"], [], "late", 1.0), "lacks the reward that came late"),
        (Talk("done", "u", ["wordone"], [], "aborted"), "is complete"),
        (Talk("gone", "u", ["wordtwo"], [], "complete", 1.0), "is aborted"),
    ],
)
async def test_what_is_not_as_a_client_saw_it_is_noticed(
    run: Archived, talk: Talk, why: str
) -> None:
    lines, _ = await search(run, talk)
    assert any(why in line for line in lines), lines


def test_words_are_found_in_any_file(run: Archived) -> None:
    assert bytes_of(["nobodysaid"], run.path) == []
    (run.path / "archive" / "left.tmp").write_bytes(b"a wordone here")
    assert any("left.tmp" in line for line in bytes_of(["wordone"], run.path))


async def test_all_that_clients_of_a_gateway_saw_is_found_and_no_word_of_who_is_deleted(
    tmp_path: Path,
) -> None:
    async with demo(tmp_path) as served:
        talkers = Talkers(served.url, 1)
        talking = asyncio.create_task(talkers.run())

        def heard() -> set[str]:
            return {talk.user for talk in talkers.talks if talk.words}

        await until(lambda: FORGOTTEN in heard() and len(heard()) > 8, timeout_s=60)
        talking.cancel()
        await asyncio.gather(talking, return_exceptions=True)
        for group in (await served.pool.list_groups(limit=1000)).items[::2]:
            await served.pool.drop_group(group.prompt_uid, "test")
        await archive_all(served)
        archive = ArchiveReader(tmp_path / "archive")
        lines, places = await missing(talkers.talks, served.pool, archive)
        assert lines == []
        assert places["archived"]
        archive.delete("user", FORGOTTEN)
        words = [word for talk in talkers.talks if talk.user == FORGOTTEN for word in talk.words]
        assert bytes_of(words, tmp_path / "archive") == []
    assert talkers.failures == []


@pytest.mark.slow
async def test_a_trainer_that_goes_on_keeps_no_word_of_what_was_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Groups are deleted through the gateway before, while and after it has them."""
    monkeypatch.setattr("tests.chaos.talkers.SHARE_FORGOTTEN", 0.5)  # it takes a third of the time
    sizes = {"sample_groups": 1, "sample_mb": 64, "rollout_samples": 8}
    trained = Trained(tmp_path, Path("stepwell/quickstart/model"), **sizes)

    async def train(pool: DataPoolClient) -> None:
        for step in itertools.count(1):
            lease = await pool.lease_batch(1, timeout_s=None)
            assert lease is not None
            await asyncio.sleep(0.2)
            batch = TokenBatch.of(lease.steps)
            await asyncio.to_thread(trained.write, step, lease.groups, batch)
            await pool.ack(lease.lease_id)

    def gone() -> list[Talk]:
        return [talk for talk in talkers.talks if talk.has_gone and talk.words]

    def places() -> list[Path]:
        return [tmp_path / "archive", *copies_in(tmp_path)]

    def of_others() -> list[str]:
        """Trained words of those whose data stays."""
        words = [w for talk in talkers.talks if talk.user != FORGOTTEN for w in talk.words]
        return bytes_of(words, tmp_path / "trained")

    def has_enough() -> bool:
        return len(gone()) >= 4 and len(trained_steps(tmp_path)) >= 4 and bool(of_others())

    async with demo(tmp_path) as served:
        talkers = Talkers(served.url, 3)
        tasks = [asyncio.create_task(each) for each in (talkers.run(), train(served.pool))]
        await until(has_enough, timeout_s=120)
        for task in tasks:
            task.cancel()
        failed = await asyncio.gather(*tasks, return_exceptions=True)
        assert [e for e in failed if not isinstance(e, asyncio.CancelledError)] == []
        await archive_all(served)
    assert bytes_of([word for talk in gone() for word in talk.words], *places()) == []
    assert of_others()
    assert talkers.failures == []
