//! The server configuration of `deploy/nats`: TLS, NKeys, and permissions by tenant, on three servers.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use bulkhead_tests::fleet::{NatsServer, TestFleet, VERSIONS, server_program, streams};
use bulkhead_tests::not_run;
use bulkhead_tests::ports::free_port;
use nkeys::KeyPair;

use super::jobs::BULKHEADS;

/// Creates a certificate authority and a certificate for 127.0.0.1. Prints a note and returns false if `openssl` fails.
fn certificates(folder: &Path) -> bool {
    let script = "set -e
        openssl req -x509 -newkey rsa:2048 -nodes -keyout ca.key -out ca.pem -days 2 -subj /CN=test-ca
        openssl req -newkey rsa:2048 -nodes -keyout key.pem -out server.csr -subj /CN=127.0.0.1
        printf 'subjectAltName=IP:127.0.0.1\\nextendedKeyUsage=serverAuth,clientAuth\\n' > extensions
        openssl x509 -req -in server.csr -CA ca.pem -CAkey ca.key -CAcreateserial -out cert.pem -days 2 \
            -extfile extensions";
    match Command::new("sh").args(["-c", script]).current_dir(folder).output() {
        Ok(output) if output.status.success() => true,
        other => {
            not_run!("openssl failed to create the certificates: {other:?}");
            false
        }
    }
}

/// Writes the seed of a key pair to a file.
fn write_seed(folder: &Path, name: &str, keys: &KeyPair) {
    let file = folder.join(name);
    std::fs::write(&file, keys.seed().unwrap()).unwrap();
    std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o600)).unwrap();
}

/// Starts three servers with the documented configuration, adapted to the paths, ports and keys of this test.
fn start() -> Option<TestFleet> {
    let program = server_program(VERSIONS[0])?;
    let folder = tempfile::tempdir().unwrap();
    if !certificates(folder.path()) {
        return None;
    }
    let (fleet_keys, acme_keys) = (KeyPair::new_user(), KeyPair::new_user());
    write_seed(folder.path(), "fleet.nk", &fleet_keys);
    write_seed(folder.path(), "acme.nk", &acme_keys);
    let template = include_str!("../../../deploy/nats/server.conf");
    let routes: Vec<u16> = (0..3).map(|_| free_port()).collect();
    let servers = (0..3).map(|index| {
        let (name, port) = (format!("n{}", index + 1), free_port());
        let mut text = template
            .replace("$SERVER_NAME", &name)
            .replace("$FLEET_NKEY", &fleet_keys.public_key())
            .replace("$ACME_NKEY", &acme_keys.public_key())
            .replace("0.0.0.0:4222", &format!("127.0.0.1:{port}"))
            .replace("0.0.0.0:6222", &format!("127.0.0.1:{}", routes[index]))
            .replace("/etc/nats/", &format!("{}/", folder.path().display()))
            .replace("/var/lib/nats", &folder.path().join(&name).display().to_string())
            .replace("100GB", "1GB");
        for (number, port) in routes.iter().enumerate() {
            text = text.replace(&format!("n{}:6222", number + 1), &format!("127.0.0.1:{port}"));
        }
        NatsServer::start_configured(&program, folder.path(), &name, port, &text)
    });
    let servers = servers.collect();
    let keys = "nkey = \"fleet.nk\"\nca = \"ca.pem\"\n".to_owned();
    let settings = format!("{}[bulkhead.b]\n", streams(3));
    let mut fleet = TestFleet::prepare(folder, servers, &settings, (keys, "tls"));
    fleet.add_host("host-a", BULKHEADS);
    Some(fleet)
}

#[test]
fn tenant_can_access_only_its_own_jobs() {
    let Some(fleet) = start() else { return };
    let text = std::fs::read_to_string(fleet.config()).unwrap();
    let file = fleet.folder.path().join("acme.toml");
    std::fs::write(&file, text.replace("\"fleet.nk\"", "\"acme.nk\"\ntenant = \"acme\"")).unwrap();
    let as_acme =
        |arguments: &[&str]| fleet.json(&[&["--config", file.to_str().unwrap()], arguments].concat());

    let (code, lines) = as_acme(&["submit", "b", "-n", "--id", "mine"]);
    assert_eq!((code, &lines[0]["outcome"]), (0, &"ok".into()), "{lines:?}");
    assert_eq!(as_acme(&["result", "mine"]).0, 0);
    let (code, lines) = as_acme(&["submit", "b", "-n", "--tenant", "other", "--id", "theirs"]);
    assert_eq!((code, &lines[0]["reason"]), (77, &"forbidden".into()), "{lines:?}");

    assert_eq!(fleet.json(&["submit", "b", "-n", "--tenant", "other", "--id", "theirs"]).0, 0);
    let (code, lines) = as_acme(&["result", "theirs", "--tenant", "other"]);
    assert_eq!((code, &lines[0]["reason"]), (77, &"forbidden".into()), "{lines:?}");
    for command in [&["status"][..], &["dead", "list"], &["init"]] {
        assert_eq!(as_acme(command).0, 69, "{command:?}");
    }
}

#[test]
fn client_with_wrong_key_or_authority_is_refused() {
    let Some(fleet) = start() else { return };
    let text = std::fs::read_to_string(fleet.config()).unwrap();
    let folder = fleet.folder.path();
    write_seed(folder, "stranger.nk", &KeyPair::new_user());
    for (name, changed) in [
        ("stranger", text.replace("\"fleet.nk\"", "\"stranger.nk\"")),
        ("no-key", text.replace("nkey = \"fleet.nk\"\n", "")),
        ("no-authority", text.replace("ca = \"ca.pem\"\n", "")),
    ] {
        let file = folder.join(format!("{name}.toml"));
        std::fs::write(&file, changed).unwrap();
        let (code, _) = fleet.json(&["--config", file.to_str().unwrap(), "status"]);
        assert_eq!(code, 69, "{name}");
    }
}
