"""For all tests."""

from hypothesis import settings

settings.register_profile("shoal", deadline=None)  # a slow machine proves nothing wrong
settings.load_profile("shoal")
