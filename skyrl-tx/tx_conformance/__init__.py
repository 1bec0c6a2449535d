"""Conformance suite of the Tinker protocol: checks against a running server, with the installed `tinker` SDK.

    python -m tx_conformance --base-url http://127.0.0.1:8000 --model NAME

Independent of the server: it does not import `tx`, and needs only `tinker` (0.16.1 or newer), numpy and httpx, which
the SDK installs. It tests a server as a black box: responses, log-probs and archives.

    checks.py       checks and their assertions
    client.py       the SDK, whatever its version, with plain numbers in and out
    wire.py         the same protocol without the SDK: what it would never send, and what only a retry sends
    server.py       the server under test: its model, tokens, new adapters
    runner.py       runs checks one after another, each with a deadline; the table
    life_cycle.py, training.py, losses.py, optimizer.py, checkpoints.py, sampling.py, ordering.py, listings.py,
    refusals.py, tenants.py       the checks
"""
