"""The gateway: an OpenAI-compatible endpoint whose calls become episodes, token for token.

    registry.py     open episodes, their keys, and attempts that wait for a client
    openai_api.py   requests, replies, streams and errors in OpenAI's form
    server.py       the HTTP routes, served by uvicorn on the event loop of the run
    agent.py        agent=gateway: programs play the attempts; Covey starts them, or they connect by themselves

Only server.py needs the packages of covey[serve].
"""
