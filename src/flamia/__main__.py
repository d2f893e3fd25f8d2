"""`python -m flamia`: the same command as the console script `flamia`."""

from flamia.cli import main

if __name__ == "__main__":
    main()
