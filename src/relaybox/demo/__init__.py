"""``relaybox demo``: a shop, a receiver that goes down, a relay that is killed, and what arrived anyway.

Every part is a process of its own and writes down what it saw in a journal of its own. At the end the
receivers' journals are compared with what the database holds.
"""
