"""`python -m launch`, the same as `python launch.py`."""

from launch import main

main.run()
