"""What whoever loads a key says when OpenSSL asks for its password."""


def no_password() -> str:
    """Raises OSError. Without it OpenSSL asks whoever sits at standard input, and waits for ever."""
    raise OSError("the key is encrypted, and nobody is there to be asked for its password: store it without one")
