"""Command line of Reprise: `python launch.py --help`."""

from launch import main

if __name__ == "__main__":
  main.run()
