"""`python -m weclaw_embedded.cli` is `weclawctl`."""

from weclaw_embedded.cli import main

main()
