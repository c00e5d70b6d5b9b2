"""Between a socket and an endpoint: connections, TLS, who may ask, what is counted and logged, how answers are sent.

Nothing here knows what a request asks for.
"""
