"""The ClientApp: its actions, each answered by `client_app.handler`.

Everything heavy is imported inside the handler, so that a failure there becomes a neutral code, and so that a deployed
site, which starts a process for every message, pays only for what the message needs.
"""

from __future__ import annotations

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


@app.query("profile")
def profile(message: Message, context: Context) -> Message:
    """The site card."""
    return _answer(message, context)


@app.query("ask")
def ask(message: Message, context: Context) -> Message:
    """The answer to a question of the method's own."""
    return _answer(message, context)


@app.query("secure_keys")
def secure_keys(message: Message, context: Context) -> Message:
    """Secure sum: two public keys for a round."""
    return _answer(message, context)


@app.query("secure_shares")
def secure_shares(message: Message, context: Context) -> Message:
    """Secure sum: shares of this site's masks, sealed for the others."""
    return _answer(message, context)


@app.train("secure_masked")
def secure_masked(message: Message, context: Context) -> Message:
    """Secure sum: local training, its change under masks."""
    return _answer(message, context)


@app.query("secure_unmask")
def secure_unmask(message: Message, context: Context) -> Message:
    """Secure sum: shares that take the masks off the sum."""
    return _answer(message, context)


@app.train()
def train(message: Message, context: Context) -> Message:
    """Local training, with the evaluation of the received model where the message asks for it."""
    return _answer(message, context)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Scores of the received model as counts."""
    return _answer(message, context)


def _answer(message: Message, context: Context) -> Message:
    try:
        from client_app.handler import answer

        return answer(message, context)
    except Exception:  # the last fence: whatever failed, only a code leaves the site
        return Message(RecordDict({"refusal": ConfigRecord({"code": "E-INTERNAL"})}), reply_to=message)
