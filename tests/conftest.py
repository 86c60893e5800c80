"""How all tests are run: examples that are made up are the same in every run, and slow machines have time for them."""

from hypothesis import settings

settings.register_profile("steady", deadline=None, derandomize=True)
settings.load_profile("steady")
