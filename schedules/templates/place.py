"""Where one vector of an output lies."""

from bnncc.topi_binary.definitions.place import Place as Place
