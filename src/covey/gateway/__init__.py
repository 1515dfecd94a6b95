"""The gateway: an OpenAI-compatible endpoint whose calls become episodes, token for token.

    book.py       who may come in: the admin's token, a key for each episode, what became of those that are over
    live.py       one episode under way: requests in, turns kept
    messages.py   messages as clients write them ↔ as chat templates and formats want them
    requests.py   a chat request, read and checked           answers.py   replies in OpenAI's form, also streamed
    app.py        the routes                                 server.py    uvicorn on the event loop of the run
    agent.py      agent=gateway: attempts handed to programs that come for them, or that are started for them
    program.py    one such program, in a process group of its own

Only app.py and server.py need the packages of covey[serve].
"""

from covey.gateway.agent import GatewayAgent
from covey.gateway.registry import Book, Live, Rules

__all__ = ["Book", "GatewayAgent", "Live", "Rules"]
