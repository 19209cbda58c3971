"""python -m trireme: the same as the command trireme."""

import sys

from trireme.engine.run.main import command

sys.exit(command())
