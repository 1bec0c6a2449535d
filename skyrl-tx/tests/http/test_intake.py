"""How many bytes of bodies are in memory together; and which requests are the same one."""

import asyncio

JSON = {"content-type": "application/json"}
SAMPLE = {"base_model": "tiny", "prompt": {"chunks": [{"tokens": [5]}]}, "sampling_params": {"max_tokens": 1}}


async def test_bodies_of_all_clients_share_a_limit(served):
    client = await served(max_bodies_mb=1)
    half_sent, go_on = asyncio.Event(), asyncio.Event()

    async def slowly():
        yield b"x" * 700_000
        half_sent.set()
        await go_on.wait()
        yield b"x" * 100

    async def post(content, path: str = "forward_backward"):
        return await client.post(f"/api/v1/{path}", content=content, headers=JSON)

    slow = asyncio.create_task(post(slowly()))
    await asyncio.wait_for(half_sent.wait(), 20)
    refused = await post(b"x" * 400_000)
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
    assert "requests of 700,000 bytes are being read already (--max-bodies-mb)" in refused.json()["detail"]
    small = await client.post("/api/v1/asample", json=SAMPLE)
    assert small.status_code == 200
    go_on.set()
    assert (await asyncio.wait_for(slow, 20)).status_code == 400
    assert (await post(b"x" * 400_000)).status_code == 400, "it is read, and no JSON"
    assert (await post(b"x" * 1_000_000)).status_code == 400, "all counts went down again"


async def test_a_sample_with_a_key_is_asked_once(served):
    anna, bela = await served("anna"), await served("bela")

    async def ask(client, **headers: str) -> str:
        return (await client.post("/api/v1/asample", json=SAMPLE, headers=headers)).json()["request_id"]

    first = await ask(anna, **{"X-Idempotency-Key": "one"})
    assert await ask(anna, **{"X-Idempotency-Key": "one"}) == first
    others = {await ask(anna, **{"X-Idempotency-Key": "two"}), await ask(bela, **{"X-Idempotency-Key": "one"})}
    assert len({first, *others, await ask(anna), await ask(anna)}) == 5
