//! The server configuration of `deploy/nats`: TLS, NKeys, and an account for each tenant, on three servers.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpListener};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use async_nats::{ConnectOptions, HeaderMap};
use bulkhead_fleet::settings::{Settings, Streams};
use bulkhead_fleet::{Fleet, FleetError};
use bulkhead_tests::fleet::{NatsServer, TestFleet, VERSIONS, result_of, server_program, streams};
use bulkhead_tests::ports::free_port;
use bulkhead_tests::{PATIENCE, not_run, run};
use futures_util::StreamExt;
use nkeys::KeyPair;

use super::jobs::BULKHEADS;

/// Maximum number of waiting jobs per tenant.
const BACKLOG: usize = 8;

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
fn start(version: &str) -> Option<TestFleet> {
    let program = server_program(version)?;
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
    let settings = format!("{}tenant_backlog = {BACKLOG}\n[bulkhead.b]\n", streams(3));
    let mut fleet = TestFleet::prepare(folder, servers, &settings, (keys, "tls"));
    fleet.add_host("host-a", BULKHEADS);
    Some(fleet)
}

/// Writes a configuration for the tenant `acme`, and returns its path.
fn acme_config(fleet: &TestFleet) -> PathBuf {
    let text = std::fs::read_to_string(fleet.config()).unwrap();
    let file = fleet.folder.path().join("acme.toml");
    std::fs::write(&file, text.replace("\"fleet.nk\"", "\"acme.nk\"\ntenant = \"acme\"")).unwrap();
    file
}

#[test]
fn tenant_can_access_only_its_own_jobs() {
    for version in VERSIONS {
        let Some(fleet) = start(version) else { return };
        let file = acme_config(&fleet);
        let as_acme =
            |arguments: &[&str]| fleet.json(&[&["--config", file.to_str().unwrap()], arguments].concat());

        let (code, lines) = as_acme(&["submit", "b", "-n", "--id", "mine"]);
        assert_eq!((code, &lines[0]["outcome"]), (0, &"ok".into()), "{lines:?}");
        assert_eq!(as_acme(&["result", "mine"]).0, 0);
        let missing = fleet.command(&["--config", file.to_str().unwrap(), "submit", "nowhere", "-n"]);
        assert_eq!(missing.status.code(), Some(66), "{missing:?}");
        let (code, lines) = as_acme(&["submit", "b", "-n", "--tenant", "other", "--id", "theirs"]);
        assert_eq!((code, &lines[0]["reason"]), (77, &"forbidden".into()), "{lines:?}");

        assert_eq!(fleet.json(&["submit", "b", "-n", "--tenant", "other", "--id", "theirs"]).0, 0);
        let (code, lines) = as_acme(&["result", "theirs", "--tenant", "other"]);
        assert_eq!((code, &lines[0]["reason"]), (77, &"forbidden".into()), "{lines:?}");
        for command in [&["status"][..], &["dead", "list"], &["init"]] {
            assert_eq!(as_acme(command).0, 69, "{command:?}");
        }
    }
}

/// Connects to a server as the tenant `acme`, without the fleet's client library.
async fn connect_raw(fleet: &TestFleet, server: &str) -> async_nats::Client {
    let seed = std::fs::read_to_string(fleet.folder.path().join("acme.nk")).unwrap();
    let options = ConnectOptions::new().nkey(seed).require_tls(true);
    options.add_root_certificates(fleet.folder.path().join("ca.pem")).connect(server).await.unwrap()
}

#[test]
fn tenant_can_use_each_server() {
    for version in VERSIONS {
        let Some(mut fleet) = start(version) else { return };
        let settings = Settings::read(&acme_config(&fleet)).unwrap();
        // Each stream is led by another server than that of at least two of the connections.
        let connect = |index: usize| {
            let mut nats = settings.nats.clone();
            nats.servers = vec![nats.servers[index].clone()];
            async move { Fleet::connect_with(&nats, &Streams::default()).await.unwrap() }
        };
        run(async {
            for index in 0..3 {
                let client = connect(index).await;
                let job = client.job("b", vec![b'x'; 100_000]);
                let reply = result_of(job.submit().await.unwrap()).await.unwrap();
                assert_eq!(reply.payload(), [b'x'; 100_000]);
                let raw = connect_raw(&fleet, &settings.nats.servers[index]).await;
                let mut notices = raw.subscribe(format!("bh.told.acme.notice-{index}")).await.unwrap();
                raw.flush().await.unwrap();
                let noticed = client.job("b", "").id(format!("notice-{index}"));
                result_of(noticed.submit().await.unwrap()).await.unwrap();
                assert!(notices.next().await.is_some());
                let missing = client.result("acme", "never-submitted", Duration::ZERO).await.unwrap_err();
                assert!(matches!(missing, FleetError::Overdue { .. }), "{missing}");
            }
        });
        fleet.wait_drained("b");
        fleet.hosts[0].kill_agent();
        run(async {
            let client = connect(0).await;
            for _ in 0..BACKLOG {
                client.job("b", "").submit().await.unwrap();
            }
            for index in 0..3 {
                let error = connect(index).await.job("b", "").submit().await.unwrap_err();
                assert!(error.to_string().contains("too many waiting jobs"), "{error}");
            }
        });
    }
}

#[test]
fn tenant_cannot_misuse_the_reply_subjects_of_requests() {
    for version in VERSIONS {
        let Some(fleet) = start(version) else { return };
        let file = acme_config(&fleet);
        let settings = Settings::read(&file).unwrap();
        assert_eq!(fleet.json(&["submit", "b", "-n", "--tenant", "other", "--id", "theirs"]).0, 0);
        run(async {
            let client = Fleet::connect_with(&settings.nats, &settings.streams).await.unwrap();
            result_of(client.job("b", "").id("mine").submit().await.unwrap()).await.unwrap();
            let raw = connect_raw(&fleet, &settings.nats.servers[0]).await;
            let read = |id: &str| format!("$JS.API.DIRECT.GET.BH_LEDGER.bh.ledger.acme.{id}");
            let job = |id: &str| {
                let mut headers = HeaderMap::new();
                headers.insert("Bulkhead-Id", id);
                headers
            };

            // The server's responses could be API requests, or other tenants' records.
            for api in ["STREAM.DELETE.BH_LEDGER", "STREAM.PURGE.BH_JOBS", "CONSUMER.DELETE.BH_JOBS.b_n_0"] {
                raw.publish_with_reply(read("none"), format!("$JS.API.{api}"), "".into()).await.unwrap();
            }
            let theirs = "bh.ledger.other.theirs";
            raw.publish_with_reply(read("mine"), theirs, "".into()).await.unwrap();
            let headers = job("own");
            raw.publish_with_reply_and_headers("bh.job.b.n.2.acme", theirs, headers, "".into())
                .await
                .unwrap();

            // The acknowledgements of more jobs than there are permits could replace the jobs' records.
            for number in 0..6 {
                let (id, subject) = (format!("wedge-{number}"), "bh.job.b.n.2.acme");
                let reply = format!("bh.ledger.acme.{id}");
                raw.publish_with_reply_and_headers(subject, reply, job(&id), "".into()).await.unwrap();
            }
            raw.flush().await.unwrap();
            for id in ["own".to_owned()].into_iter().chain((0..6).map(|number| format!("wedge-{number}"))) {
                let result = client.result("acme", &id, PATIENCE).await;
                assert!(result.is_ok(), "{id}: {result:?}");
            }
        });
        assert_eq!(fleet.json(&["result", "theirs", "--tenant", "other"]).0, 0);
        assert_eq!(fleet.json(&["submit", "b", "-n", "--tenant", "other"]).0, 0);
        fleet.wait_drained("b");
        let (_, findings) = fleet.json(&["init"]);
        assert!(findings.iter().all(|finding| finding["state"] == "unchanged"), "{findings:?}");
    }
}

#[test]
fn client_with_wrong_key_or_authority_is_refused() {
    let Some(fleet) = start(VERSIONS[0]) else { return };
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

#[test]
fn server_without_tls_receives_no_credentials() {
    let server = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let plain = server.local_addr().unwrap();
    let received = std::thread::spawn(move || {
        let (mut client, _) = server.accept().unwrap();
        let info = "{\"server_id\":\"n1\",\"version\":\"2.12.8\",\"max_payload\":1048576,\"headers\":true}";
        write!(client, "INFO {info}\r\n").unwrap();
        let mut bytes = vec![0; 1024];
        let length = client.read(&mut bytes).unwrap_or(0);
        String::from_utf8_lossy(&bytes[..length]).into_owned()
    });
    // Like an address that a server with TLS announces, the address of the second server does not begin with `tls://`.
    let closed = free_port();
    let connected = run(Fleet::connect(&format!(" TLS://127.0.0.1:{closed}, nats://{plain}")));
    assert!(connected.is_err());
    let received = received.join().unwrap();
    assert!(!received.contains("CONNECT"), "{received}");
}
