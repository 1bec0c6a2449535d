"""A service, its engine and three users in one process that is to be killed at any moment, and started again.

What a user was told goes into a journal beside; after a restart he goes on as the SDK does: he repeats what was not
answered, and asks again for results. The journal and the database must tell the same story.

    python crash_worker.py FOLDER NUM_SEQS
"""

import asyncio
import json
import os
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # for `stores`

from service_users import Client, running, scripted


class Journal:
    """Record of what a user has been told, written to disk at once."""

    def __init__(self, path: Path):
        self.told: dict[str, str | dict] = {}
        if path.exists():
            for line in path.read_text().split("\n"):
                if line.endswith("}"):  # the last one may be cut short
                    self.told |= json.loads(line)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(self._file, b"\n")

    def note(self, **what: object) -> None:
        self.told |= what
        os.write(self._file, json.dumps(what).encode() + b"\n")
        os.fsync(self._file)


async def user(client: Client, journal: Journal, num_seqs: int) -> None:
    if "session" not in journal.told:
        journal.note(session=(await client.begin()).session_id)
    client.session_id = str(journal.told["session"])
    model = await client.model(seed=7)
    pending: dict[int, asyncio.Task[None]] = {}
    for seq in range(1, num_seqs + 1):
        if f"result{seq}" not in journal.told:
            pending[seq] = asyncio.create_task(request(client, journal, model, seq))
        if len(pending) >= 4:
            await pending.pop(min(pending))
    await asyncio.gather(*pending.values())
    journal.note(finished=model)


async def request(client: Client, journal: Journal, model: str, seq: int) -> None:
    if seq % 10 == 0:
        answer = await client.save_sampler(model, seq, sampling_session_seq_id=seq)
    elif seq % 3 == 0:
        answer = await client.step(model, seq)
    else:
        answer = await client.train(model, seq, length=60, copies=150 if seq % 7 == 0 else 1)
    journal.note(**{f"accepted{seq}": answer["request_id"]})
    result = await client.result(answer)
    if seq % 10 == 0:
        sampler = result["sampling_session_id"]
        result = {"state": (await client.result(await client.sample(sampler, seq)))["state"]}
    earlier = journal.told.get(f"result{seq}", result["state"])
    assert earlier == result["state"], f"{seq}: told {earlier} before, and {result} now"
    journal.note(**{f"result{seq}": result["state"]})


async def main(folder: Path, num_seqs: int) -> None:
    command = scripted(folder / "state", commands_per_snapshot=5, seconds=0.005)
    async with running(folder, command=command, standby_engine=True) as service:
        journals = [Journal(folder / f"user{i}.jsonl") for i in range(3)]
        async with asyncio.TaskGroup() as group:
            for i, journal in enumerate(journals):
                group.create_task(user(Client(service, f"tenant{i}"), journal, num_seqs))
    print("all done", flush=True)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2])))
