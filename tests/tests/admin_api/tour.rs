//! Runs the example commands from `docs/operations/http.md`.

use std::path::Path;
use std::process::{Command, Stdio};

use bulkhead_tests::http::Place;
use bulkhead_tests::{Supervisor, not_run, wait_for};

/// Returns the shell commands in a section of the documentation page. Joins commands that span several lines into one
/// line.
fn commands(section: &str) -> Vec<String> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/operations/http.md");
    let text = std::fs::read_to_string(path).expect("the page exists");
    let (_, rest) = text.split_once(&format!("\n## {section}\n")).expect("the section exists");
    let section = rest.split("\n## ").next().expect("the section ends");
    let blocks = section.split("\n```sh\n").skip(1).filter_map(|block| block.split("\n```").next());
    let whole = blocks.map(|block| block.replace("\\\n", "")).collect::<Vec<_>>().join("\n");
    whole.lines().map(str::to_owned).collect()
}

/// Runs a command from the documentation, and returns the output. First replaces the paths and the address with those
/// of this test.
fn run(folder: &Path, command: &str, address: &str) -> String {
    let here = |name: &str| folder.join(name).to_str().expect("the path is valid UTF-8").to_owned();
    let command = command
        .replace("/run/bulkhead/admin.sock", &here("admin.sock"))
        .replace("/etc/bulkhead/token", &here("token"))
        .replace("127.0.0.1:9464", address)
        .replace("curl ", "curl -sS --fail-with-body --max-time 30 ");
    let output = Command::new("sh")
        .args(["-c", &command])
        .current_dir(folder)
        .stdin(Stdio::null())
        .output()
        .expect("the shell runs");
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    let complained = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{command}\n{} {said}{complained}", output.status);
    said
}

#[test]
fn documented_curl_commands_succeed() {
    if Command::new("curl").arg("--version").stdout(Stdio::null()).status().is_err() {
        not_run!("curl is not installed");
        return;
    }
    let all = commands("A tour with curl");
    assert!(all.len() >= 18, "{} commands", all.len());
    let folder = tempfile::tempdir().unwrap();
    let picture: Vec<u8> = (0..200_000_u32).map(|i| (i % 251) as u8).collect();
    std::fs::write(folder.path().join("picture.png"), &picture).unwrap();
    let (before, then): (Vec<String>, Vec<String>) =
        all.into_iter().partition(|line| line.contains("urandom"));
    assert_eq!(before.len(), 1);
    run(folder.path(), &before[0], "");

    let supervisor = Supervisor::launch(
        folder,
        "http = \"127.0.0.1:0\"\nhttp_token_file = \"token\"",
        "[bulkhead.thumbnail]\nexec = [\"cat\"]\nmax_queue = 10\n",
    );
    wait_for("the supervisor is ready", || (supervisor.try_get("/readyz")?.0 == 200).then_some(()));
    let Place::Tcp(address) = Place::tcp(&supervisor) else { panic!() };
    for command in &then {
        run(supervisor.folder.path(), command, &address.to_string());
        for (option, name) in [("-o thumbnail.png", "thumbnail.png"), ("-o answer.txt", "answer.txt")] {
            if command.contains(option) {
                let got = std::fs::read(supervisor.file(name)).unwrap();
                assert!(got.ends_with(&picture), "{command}: {} bytes", got.len());
                std::fs::remove_file(supervisor.file(name)).unwrap();
            }
        }
    }
    assert_eq!(supervisor.number("thumbnail", "done"), 4);
    assert_eq!(supervisor.number("thumbnail", "queue_capacity"), 100);
}
