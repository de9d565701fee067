"""HTTP/1.1 (RFC 9112), for everybody."""
