"""`prfaas certs`: a test CA with a server and a client certificate."""

from __future__ import annotations

import datetime
from pathlib import Path

import click

from prfaas.errors import InputError


@click.command()
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path, file_okay=False))
@click.option(
    "--host",
    "hosts",
    multiple=True,
    help="Host name or address for the server certificate; repeatable.",
)
@click.option(
    "--days", default=365, show_default=True, help="Validity of the certificates in days."
)
@click.option("--force", is_flag=True, help="Replace the existing set in DIR.")
def certs(folder: Path, hosts: tuple[str, ...], days: int, force: bool) -> None:
    """Make a test CA, a server and a client certificate in DIR, for mutual TLS between kvds.

    The server certificate is valid for localhost, for every --host, and for the service name, which
    clients check when they connect through a relay. Only you can read the keys. Give ca.pem and one
    pair to each host. Keep ca.key secret: with it, a host can join the deployment. Use the files
    with --tls-ca, --tls-cert and --tls-key of `prfaas kvd` and `prfaas doctor`.

    \b
      prfaas certs ./certs
      prfaas certs ./certs --host kv1.example.net --host 10.0.0.7
    """
    # Imported here, because this import takes longer than the other commands take to start.
    from prfaas.security.certificates import ALWAYS_HOSTS, make_certificates

    if not 1 <= days <= 3650:
        raise InputError(f"{days} days", where="--days", fix="give 1 to 3650")
    made = make_certificates(folder, hosts, valid=datetime.timedelta(days=days), force=force)
    names = ", ".join(dict.fromkeys((*ALWAYS_HOSTS, *hosts)))
    what = {
        made.ca: "CA certificate: give it to every host",
        made.ca_key: "CA key: keep it secret (mode 0600)",
        made.server: f"server certificate for {names}",
        made.server_key: "server key (mode 0600)",
        made.client: "client certificate",
        made.client_key: "client key (mode 0600)",
    }
    width = max(len(str(path)) for path in what)
    for path, text in what.items():
        click.echo(f"{str(path):<{width}}  {text}")
    click.echo(f"valid for {days} days, until {made.not_after:%Y-%m-%d %H:%M} UTC")
