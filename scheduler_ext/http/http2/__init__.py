"""HTTP/2 (RFC 9113) over TLS, for whom it spares a connection: kube-scheduler sends all its binds on one.

Only who has a client certificate is served so: what thousands of connections together can make us do is bounded for
strangers by HTTP/1.1 alone. What is allowed and how long is as there: see `exchange`. What a peer can make us keep or
do is bounded for each connection, whatever it sends: heads, streams, frames that bring nothing, and time.
"""
