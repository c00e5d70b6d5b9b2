"""GGUF models of a hub are found by the names that vLLM and llama.cpp have for them. No test reaches the network."""

import shutil
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub.errors import OfflineModeIsEnabled
from huggingface_hub.utils import filter_repo_objects

from jaxpaged.errors import CheckpointError
from jaxpaged.params.gguf_folder.hub_names import HubName, chosen, hub_name
from jaxpaged.params.hub import resolve_model_folder
from tests.params.gguf_folder.gguf_checkpoints import write_gguf_checkpoint

FILES = [
    "README.md",
    "config.json",
    "mmproj-F16.gguf",
    "Some-4B-Q4_0.gguf",
    "some-4b-q4_k_m.gguf",
    "Some-4B-UD-Q4_K_XL.gguf",
    "Some-4B-IQ4_XS.gguf",
    "Some-4B-Q8_0-00001-of-00002.gguf",
    "Some-4B-Q8_0-00002-of-00002.gguf",
    "BF16/Some-4B-BF16-00001-of-00002.gguf",
    "BF16/Some-4B-BF16-00002-of-00002.gguf",
    "Q6_K/weights.gguf",
]
BF16 = FILES[9:11]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("org/Some-GGUF:Q4_0", FILES[3:4]),
        ("org/Some-GGUF:Q4_K_M", FILES[4:5]),
        ("org/Some-GGUF", FILES[4:5]),
        ("org/Some-GGUF:UD-Q4_K_XL", FILES[5:6]),
        ("org/Some-GGUF:q8_0", FILES[7:9]),
        ("org/Some-GGUF:BF16", BF16),
        ("org/Some-GGUF:Q6_K", FILES[11:]),
        ("org/Some-GGUF/BF16/Some-4B-BF16-00001-of-00002.gguf", BF16),
        ("org/Some-GGUF/BF16/Some-4B-BF16.gguf", BF16),
        ("org/Some-GGUF/Some-4B-IQ4_XS.gguf", FILES[6:7]),
    ],
)
def test_a_name_says_which_files(name, expected):
    assert chosen(hub_name(name), FILES) == expected


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("org/Some-GGUF:Q4_K", "no Q4_K, but BF16/Some-4B-BF16.gguf, Q6_K/weights.gguf, Some-4B-IQ4_XS"),
        ("org/Some-GGUF:Q4_K_XL", "no Q4_K_XL"),
        ("org/Some-GGUF/mmproj-F16.gguf", "no mmproj-F16.gguf"),
        ("org/Some-GGUF:4B", "6 models that are 4B: .*. Name one: org/Some-GGUF/FILE.gguf"),
    ],
)
def test_what_a_repository_does_not_have_or_has_twice_is_said(name, words):
    with pytest.raises(CheckpointError, match=words):
        chosen(hub_name(name), FILES)
    with pytest.raises(CheckpointError, match="has no models in GGUF format"):
        chosen(hub_name(name), FILES[:3])


@pytest.mark.parametrize(
    "name", ["org", "org/a:b:c", "/org/a:Q4_0", "./a/b.gguf", "../a/b/c.gguf", "a/b/../c.gguf", ""]
)
def test_what_cannot_be_of_a_hub(name):
    assert hub_name(name) is None


def test_what_a_name_says():
    assert hub_name("org/a.b") == HubName("org/a.b")
    assert hub_name("org/a:Q4_0") == HubName("org/a", kind="Q4_0")
    assert hub_name("org/a/b/c.gguf") == HubName("org/a", file="b/c.gguf")


class FakeHub:
    """A hub with one repository, whose files are those of a folder."""

    def __init__(self, folder, cache):
        self.folder, self.cache, self.is_offline = folder, cache, False

    def list_repo_files(self, name, revision=None):
        if self.is_offline:
            raise OfflineModeIsEnabled("no network here")
        return [str(path.relative_to(self.folder)) for path in self.folder.rglob("*") if path.is_file()]

    def snapshot_download(self, name, *, allow_patterns=None, ignore_patterns=None, local_files_only=False, **where):
        if not (local_files_only or self.is_offline):
            for file in filter_repo_objects(
                self.list_repo_files(name), allow_patterns=allow_patterns, ignore_patterns=ignore_patterns
            ):
                (self.cache / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(self.folder / file, self.cache / file)
        return str(self.cache)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "own"))
    hub = FakeHub(tmp_path / "repository", tmp_path / "cache")
    for file in ("Some-Q4_K_M.gguf", "BF16/Some [new]-BF16.gguf"):
        (hub.folder / file).parent.mkdir(parents=True, exist_ok=True)
        write_gguf_checkpoint("llama", hub.folder / file)
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: hub)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub.snapshot_download)
    return hub


@pytest.mark.parametrize("name", ["org/Some-GGUF:BF16", "org/Some-GGUF/BF16/Some [new]-BF16.gguf"])
def test_one_model_is_downloaded_and_served_from_the_cache_without_network(hub, name):
    folder = resolve_model_folder(name)
    assert [path.name for path in hub.cache.rglob("*.gguf")] == ["Some [new]-BF16.gguf"]
    assert (folder / "config.json").exists() and (folder / "Some [new]-BF16.gguf").resolve().is_relative_to(hub.cache)
    hub.is_offline = True
    assert resolve_model_folder(name) == folder


def test_a_repository_with_nothing_else_needs_no_kind(hub):
    hub.cache.mkdir()
    for name in ("org/Some", "org/Some-GGUF"):
        assert resolve_model_folder(name).name.startswith("Some-Q4_K_M-")
    (hub.folder / "config.json").write_text("{}")
    assert resolve_model_folder("org/Some") == Path(hub.cache), "that of other formats comes first"


def test_a_path_that_is_not_there_and_no_model_of_the_hub_either_is_said(tmp_path):
    with pytest.raises(CheckpointError, match="there is no file a/b.gguf"):
        resolve_model_folder("a/b.gguf")
    with pytest.raises(CheckpointError, match="somebody/something is not in the local cache, and the hub cannot be"):
        resolve_model_folder("somebody/something:Q4_0", download_dir=str(tmp_path))
