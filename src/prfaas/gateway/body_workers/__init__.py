"""Long request bodies are read by worker processes: nothing in such a body can stop the gateway's
event loop or take the gateway's memory.

    pool        the workers: who gets the next one, and what happens when one dies or takes too long
    process     one worker process and its socket
    messages    what the two sides send to each other
    worker      the program of a worker
"""
