"""The protocol as a list of claims, each tried against a running server with whatever `tinker` SDK is installed.

    python -m tx.contract --base-url http://127.0.0.1:8000 --model NAME

A package of its own: it imports nothing else of `tx`, and needs only `tinker` (0.16.1 or newer), numpy and httpx, which
the SDK brings. It knows nothing of how a server is made; what it sees are answers, log-probs and archives.

    checks.py       what a check is, and the words it judges with
    client.py       the SDK, whatever its version, with plain numbers in and out
    wire.py         the same protocol without the SDK: what it would never send, and what only a retry sends
    world.py        what a check is given: a server, a model, tokens, fresh adapters
    runner.py       runs checks one after another, each with a deadline; the table
    life_cycle.py, training.py, losses.py, optimizer.py, checkpoints.py, sampling.py, ordering.py, listings.py,
    refusals.py, tenants.py       the checks
"""
