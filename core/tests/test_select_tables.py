"""A table of options that no backend reads is told where it is a slip, and kept where its backend is elsewhere."""

from __future__ import annotations

import pytest

from attnplug.config import AttentionConfig
from attnplug.device import DeviceFacts
from attnplug.errors import ConfigError
from attnplug.select import resolve

CPU = DeviceFacts("cpu")


def test_a_misspelt_table_is_refused_with_the_right_name(dists):
    dists.backend("acme_fast")
    config = AttentionConfig.model_validate({"backend": {"acme_fsat": {"splits": 4}}})
    with pytest.raises(ConfigError, match=r"\[backend.acme_fsat\] configures no backend; did you mean 'acme_fast'"):
        resolve(None, config, CPU)


def test_a_table_of_a_backend_that_is_not_installed_here_stays(dists):
    dists.backend("acme_fast")
    config = AttentionConfig.model_validate({"backend": {"flashinfer": {"x": 1}, "some_vendors_own": {"y": 2}}})
    assert resolve(None, config, CPU).prefill == "acme_fast"
