"""agent=gui: an agent that looks at a web page and acts on it with mouse and keyboard.

agent.py      the episode: screenshot in, one action out, until the task is finished
actions.py    actions, and the formats in which a model writes them
pool.py       the browsers of a run, and the pages that episodes play on
browser.py    one Chromium, in a worker process
network.py    the proxy that keeps a page to the addresses of its task
"""
