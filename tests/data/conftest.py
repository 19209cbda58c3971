"""Codecs of a small tokenizer."""

import pytest
from chats import CHATML, make_tokenizer

from trireme.engine.data.codec import load_codec


@pytest.fixture(scope="module")
def codecs(tmp_path_factory):
    """Without and with a chat template."""
    found = []
    for template in ({}, {"chat_template": CHATML}):
        folder = tmp_path_factory.mktemp("model")
        make_tokenizer(folder, **template)
        found.append(load_codec(folder))
    return found
