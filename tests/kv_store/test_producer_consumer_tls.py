"""TLS between engines that lend pages to each other: who gets in, and what is said to those who do not."""

import shutil
import socket
import struct
import subprocess
import threading

import pytest

from jaxpaged.config import EngineConfig
from jaxpaged.errors import ConfigError
from jaxpaged.kv_store.peering import Peering
from jaxpaged.kv_store.tls import TlsFiles
from tests.kv_store.test_producer_consumer import KEYS, SECRET, borrowing, eventually, got, hangs_up, lending

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")

CA_CONFIG = """
[ca]
default_ca = own
[own]
database = index.txt
serial = serial
new_certs_dir = .
default_md = sha256
policy = any
[any]
commonName = supplied
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two authorities, and what the first one signed: for 127.0.0.1, for another host, and what has expired."""
    folder = tmp_path_factory.mktemp("certificates")

    def openssl(*arguments):
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)

    new = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    for name in ("ca", "stranger"):
        openssl(
            "req",
            "-x509",
            *new,
            "-keyout",
            f"{name}.key",
            "-out",
            f"{name}.pem",
            "-subj",
            f"/CN={name}",
            "-addext",
            "subjectAltName=IP:127.0.0.1",
        )
    (folder / "ca.cnf").write_text(CA_CONFIG)
    (folder / "index.txt").touch()
    (folder / "serial").write_text("01")
    for name, host, end in (
        ("here", "IP:127.0.0.1", "20991231"),
        ("elsewhere", "DNS:elsewhere", "20991231"),
        ("expired", "IP:127.0.0.1", "20210101"),
    ):
        (folder / "names").write_text(f"subjectAltName={host}")
        openssl("req", *new, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
        openssl(
            "ca",
            "-batch",
            "-config",
            "ca.cnf",
            "-cert",
            "ca.pem",
            "-keyfile",
            "ca.key",
            "-in",
            f"{name}.csr",
            "-out",
            f"{name}.pem",
            "-notext",
            "-startdate",
            "20200101000000Z",
            "-enddate",
            f"{end}000000Z",
            "-extfile",
            "names",
        )
    return folder


@pytest.fixture
def files(folder):
    def files(name=None, authority=None):
        path = lambda file: None if file is None else str(folder / file)
        return TlsFiles(
            *(path(f"{name}.{end}") if name else None for end in ("pem", "key")),
            path(f"{authority}.pem") if authority else None,
        )

    return files


@pytest.mark.parametrize("secret", [None, SECRET])
def test_pages_are_encrypted_and_both_sides_know_each_other(files, secret):
    tls = files("here", "ca")
    with (
        lending(secret, tls=tls) as (producer, _),
        borrowing(producer, secret=secret, tls=tls) as (consumer, source),
    ):
        assert all(got(consumer, key) is not None for key in KEYS)
        assert len(consumer._idle) == 1 and consumer._idle[0][1]._socket.version() == "TLSv1.3"
        assert consumer.stats()["kv_borrowed_pages"] == {"shared_memory": 0, "unix": 0, "tcp": 0, "tls": len(KEYS)}
        consumer.release(source)
        eventually(lambda: producer.stats()["kv_leases_released"] == 1)


def test_a_self_signed_certificate_is_its_own_authority(files):
    theirs, ours = files("stranger"), files(authority="stranger")
    with lending(tls=theirs) as (producer, _), borrowing(producer, tls=ours) as (consumer, _):
        assert got(consumer, KEYS[0]) is not None


@pytest.mark.parametrize(
    ("shown", "asked", "own", "trusted", "words"),
    [
        ("here", None, None, "stranger", "unable to get local issuer certificate"),
        ("stranger", None, None, "ca", "self-signed certificate"),
        ("expired", None, None, "ca", "certificate has expired"),
        ("elsewhere", None, None, "ca", "not valid for '127.0.0.1'"),
        ("here", "ca", None, "ca", "certificate required"),
        ("here", "ca", "stranger", "ca", "unknown ca"),
        ("here", "ca", "expired", "ca", "certificate expired"),
    ],
)
def test_wrong_certificates_are_refused_by_name(files, caplog, shown, asked, own, trusted, words):
    theirs, ours = files(shown, asked), files(own, trusted)
    with lending(tls=theirs) as (producer, _), borrowing(producer, tls=ours) as (consumer, _):
        assert got(consumer, KEYS[0]) is None and got(consumer, KEYS[1]) is None
        eventually(lambda: producer.stats()["kv_lent_refused"] == 1)
        assert producer.stats()["kv_lent_pages"] == 0 and consumer.usage().counters.corrupt == 1
    assert "kv_ssl_ca_certs" in caplog.text
    if asked is None:
        assert words in caplog.text.replace("self signed", "self-signed")
    else:
        assert "A consumer of keys and values is refused: TLS with the peer fails" in caplog.text


@pytest.mark.parametrize("secret", [None, SECRET])
def test_who_speaks_no_tls_and_who_does_alone(files, caplog, secret):
    with (
        lending(secret, tls=files("here")) as (producer, _),
        borrowing(producer, secret=secret) as (consumer, _),
    ):
        assert got(consumer, KEYS[0]) is None
        eventually(lambda: producer.stats()["kv_lent_refused"] == 1)
    tls = files(authority="ca")
    with lending(secret) as (producer, _), borrowing(producer, secret=secret, tls=tls) as (consumer, _):
        assert got(consumer, KEYS[0]) is None
        eventually(lambda: producer.stats()["kv_lent_refused"] == 1)
    assert (
        "The peer speaks TLS, and this engine does not" in caplog.text
        and "hung up on the greeting by TLS" in caplog.text
    )


def test_a_borrower_without_tls_that_is_hung_up_on_says_what_may_be_missing(caplog):
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def hang_up():
            connection, _ = listener.accept()
            connection.recv(16)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.close()  # which resets it

        threading.Thread(target=hang_up, daemon=True).start()
        with (
            lending() as (producer, _),
            borrowing(producer) as (consumer, _),
            pytest.raises(ConnectionError, match="none by TLS: .*give this engine kv_ssl_ca_certs"),
        ):
            consumer._connect(listener.getsockname())


def test_who_says_nothing_in_place_of_a_greeting_is_hung_up_on(files, monkeypatch):
    monkeypatch.setattr("jaxpaged.kv_store.connections.ASK_SECONDS", 0.05)
    with lending(tls=files("here")) as (producer, _):
        with socket.create_connection((producer.host, producer.port), 5) as connection:
            assert hangs_up(connection)
        eventually(lambda: producer.stats()["kv_lent_refused"] == 1)
        with borrowing(producer, tls=files(authority="ca")) as (consumer, _):
            assert got(consumer, KEYS[0]) is not None


def test_options_and_files(folder, files):
    path = lambda name: str(folder / name)
    of = lambda **options: EngineConfig.from_options(**options).cache.offload.peering
    both = {"kv_ssl_certfile": path("here.pem"), "kv_ssl_keyfile": path("here.key"), "kv_ssl_ca_certs": path("ca.pem")}
    assert of(kv_role="kv_both", **both) == Peering("kv_both", tls=files("here", "ca"))
    assert of(kv_role="kv_consumer", kv_ssl_ca_certs=path("ca.pem")).tls == files(authority="ca")
    for words, options in {
        "Add kv_ssl_certfile": {"kv_role": "kv_producer", "kv_ssl_ca_certs": path("ca.pem")},
        "without a certificate": {"kv_role": "kv_consumer", "kv_ssl_keyfile": path("ca.key")},
        "Add kv_ssl_ca_certs": {"kv_role": "kv_both", "kv_ssl_certfile": path("here.pem")},
        "Give it a kv_role": {"kv_ssl_certfile": path("here.pem")},
    }.items():
        with pytest.raises(ConfigError, match=words):
            of(**options)
    for words, wrong in {
        "kv_ssl_certfile is .*cannot be read": TlsFiles(path("none.pem")),
        "no certificate and its key": TlsFiles(path("here.pem"), path("ca.key")),
        "holds no certificates": TlsFiles(path("here.pem"), path("here.key"), path("here.key")),
    }.items():
        for lends in (True, False):
            with pytest.raises(ConfigError, match=words):
                wrong.check(lends=lends)
