"""`python -m mmcache` is the `mmcache` command."""

from mmcache.cli import main

if __name__ == "__main__":
    main()
