//! The dashboard, in a real browser, with a real supervisor and real workers.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use bulkhead_client::blocking::Client;
use bulkhead_tests::browser::Browser;
use bulkhead_tests::http::Place;
use bulkhead_tests::{Supervisor, programs, wait_for};
use nix::sys::signal::Signal;
use serde_json::{Value, json};

const TOKEN: &str = "a-token-of-the-tests";
const BEARER: &str = "Authorization: Bearer a-token-of-the-tests";

const BULKHEADS: &str = r#"
[bulkhead.thumbnail]
command = ["MISBEHAVE"]
processes = 2
max_in_flight = 2
max_queue = 20
[bulkhead.sql]
command = ["MISBEHAVE"]
max_queue = 10
breaker = { window = "10s", min_calls = 20, failure_rate = 0.5 }
[bulkhead.script]
exec = ["sh", "-c", "cat >&2; kill -SEGV $$"]
env = { PATH = "/usr/bin:/bin" }
"#;

/// Names that would do something if they were taken for markup, or for what steers a terminal.
const HOSTILE: &str = "<img src=x onerror=window.hacked=1><script>window.hacked=1</script>\u{202e}\u{1b}[31m";
/// How they are shown.
const HARMLESS: &str =
    "<img src=x onerror=window.hacked=1><script>window.hacked=1</script>\\u202e\\u001b[31m";

/// A supervisor whose dashboard can be had, and where.
struct Site {
    supervisor: Supervisor,
    place: Place,
    address: String,
}

impl Site {
    fn start(bulkheads: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("token");
        std::fs::write(&path, TOKEN).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).unwrap();
        let supervisor = Supervisor::launch(folder, &keys("127.0.0.1:0"), bulkheads);
        wait_for("the supervisor is ready", || (supervisor.try_get("/readyz")?.0 == 200).then_some(()));
        let place = Place::tcp(&supervisor);
        let Place::Tcp(address) = &place else { panic!() };
        let address = address.to_string();
        // The next one is to be found at the same place.
        supervisor.configure(&keys(&address), bulkheads);
        Self { supervisor, place, address }
    }

    /// The address with the token in it: the browser asks nobody.
    fn url(&self) -> String {
        format!("http://me:{TOKEN}@{}/", self.address)
    }

    fn stop(&mut self) {
        self.supervisor.signal(Signal::SIGKILL);
        self.supervisor.wait();
    }

    fn start_again(&mut self) {
        let config = self.supervisor.file("workers.toml");
        let mut command = Command::new(programs().join("bulkhead-supervisor"));
        command.arg("--config").arg(config).stdin(Stdio::null()).stdout(Stdio::null());
        let log = std::fs::File::create(self.supervisor.file("log")).unwrap();
        self.supervisor.child = command.stderr(log).spawn().unwrap();
        wait_for("the supervisor is ready", || (self.supervisor.try_get("/readyz")?.0 == 200).then_some(()));
    }

    fn crash(&self, bulkhead: &str) {
        self.place.job(bulkhead, "abort", &[BEARER], b"").problem(502);
    }
}

fn keys(address: &str) -> String {
    format!("http = \"{address}\"\nhttp_token_file = \"token\"")
}

/// A site and a browser that shows it; `None` where there is no browser.
fn open(bulkheads: &str) -> Option<(Site, Browser)> {
    let browser = Browser::start()?;
    let site = Site::start(bulkheads);
    browser.resize(1440, 1000);
    browser.visit(&site.url());
    browser.wait(
        "document.querySelectorAll('.card').length && document.querySelector('#link').textContent === 'live'",
    );
    Some((site, browser))
}

/// Nothing went wrong in the page, and nobody else was asked for anything. While the supervisor is away, requests
/// fail: that is not the page's fault.
fn check(site: &Site, browser: &Browser) {
    let errors: Vec<Value> = browser
        .log("browser")
        .into_iter()
        .filter(|entry| entry["source"] != "network" || !entry.to_string().contains("net::ERR_"))
        .filter(|entry| entry["level"] == "SEVERE" || entry["source"] == "security")
        .collect();
    assert!(errors.is_empty(), "{errors:#?}");
    let mut asked = 0;
    for entry in browser.log("performance") {
        let message: Value = serde_json::from_str(entry["message"].as_str().unwrap()).unwrap();
        if message["message"]["method"] != "Network.requestWillBeSent" {
            continue;
        }
        let url = message["message"]["params"]["request"]["url"].as_str().unwrap().to_owned();
        let is_own = url.starts_with(&format!("http://{}/", site.address)) || url.starts_with(&site.url());
        assert!(is_own || url.starts_with("data:"), "{url}");
        asked += 1;
    }
    assert!(asked > 3, "{asked} requests were seen");
    assert_eq!(browser.value("window.hacked ?? null"), Value::Null);
}

fn card(name: &str) -> String {
    format!(".card[data-name={name}]")
}

#[test]
fn every_bulkhead_has_a_card_and_a_crash_is_told_at_once() {
    let Some((site, browser)) = open(BULKHEADS) else { return };
    let names = browser.value("[...document.querySelectorAll('.card h3')].map((e) => e.textContent)");
    assert_eq!(names, json!(["thumbnail", "sql", "script"]));
    assert_eq!(browser.text(&format!("{} .badge", card("thumbnail"))), "ready");
    browser.wait(&format!(
        "document.querySelector('{} .gauge .value').textContent === '0 / 4'",
        card("thumbnail")
    ));
    // Only where there is one, says the configuration.
    browser.wait(&format!(
        "document.querySelector('{} .breaker').textContent === 'breaker closed'",
        card("sql")
    ));
    assert_eq!(browser.text(&format!("{} .breaker", card("thumbnail"))), "");

    let began = Instant::now();
    site.crash("thumbnail");
    browser
        .wait("[...document.querySelectorAll('#feed .kind')].some((e) => e.textContent === 'job crashed')");
    println!("a crash was on the page {:?} after the job was sent", began.elapsed());
    assert!(began.elapsed() < Duration::from_secs(20), "{:?}", began.elapsed());
    browser.wait("document.querySelector('#crashes .cause')?.textContent === 'SIGABRT'");
    browser.click("#crashes summary");
    browser.wait("document.querySelector('#crashes .report')?.textContent.includes('which did it')");

    // What is running is told.
    let client = Client::connect(site.supervisor.socket()).unwrap();
    let job = client.job("thumbnail", "").operation("yield").start().unwrap();
    browser.wait(&format!(
        "document.querySelector('{} .gauge .value').textContent === '1 / 4'",
        card("thumbnail")
    ));
    drop(job);
    browser.wait("document.querySelector('#heat').getAttribute('aria-label').includes('thumbnail')");
    browser.wait("document.querySelector('#heat-table').rows.length === 3");
    check(&site, &browser);
}

#[test]
fn what_changes_something_is_confirmed_first() {
    let Some((site, browser)) = open(BULKHEADS) else { return };
    let limit = |name: &str| site.supervisor.number(name, "limit");
    browser.click(&format!("{} h3 button", card("thumbnail")));
    browser.wait("document.querySelector('#details h2')?.textContent === 'thumbnail'");
    browser.wait("document.querySelectorAll('#details [aria-label=Workers] tbody tr').length === 2");

    // It can be left.
    browser.click("[data-action=resize]");
    browser.fill("#dialog [name=max_in_flight]", "9");
    browser.click("#dialog .actions button[type=button]");
    browser.wait("!document.querySelector('#dialog').open");
    browser.click("[data-action=drain]");
    assert!(browser.text("#dialog").contains("rejected as draining"));
    browser.press(&["\u{e00c}"]);
    browser.wait("!document.querySelector('#dialog').open");
    assert_eq!(browser.text("#details h2"), "thumbnail", "Esc closes one thing");
    assert_eq!(
        (limit("thumbnail"), site.supervisor.snapshot("thumbnail")["state"].clone()),
        (4, json!("ready"))
    );

    browser.click("[data-action=resize]");
    browser.fill("#dialog [name=max_in_flight]", "3");
    browser.fill("#dialog [name=max_queue]", "7");
    browser.click("#dialog .primary");
    browser.wait("!document.querySelector('#dialog').open");
    site.supervisor.wait_number("thumbnail", "limit", 6);
    assert_eq!(site.supervisor.number("thumbnail", "queue_capacity"), 7);
    browser.wait(&format!(
        "document.querySelector('{} .gauge .value').textContent === '0 / 6'",
        card("thumbnail")
    ));

    // What the supervisor refuses stays to be mended.
    browser.click("[data-action=resize]");
    browser.fill("#dialog [name=processes]", "100000");
    browser.click("#dialog .primary");
    browser.wait("document.querySelector('#dialog .error')?.textContent.includes('processes must be')");
    browser.press(&["\u{e00c}"]);

    browser.click("[data-action=drain]");
    browser.click("#dialog .primary");
    browser.wait("document.querySelector('[data-action=resume]')");
    assert_eq!(site.supervisor.snapshot("thumbnail")["state"], "draining");
    browser.click("[data-action=resume]");
    browser.click("#dialog .primary");
    browser.wait("document.querySelector('[data-action=drain]')");
    browser.click("[data-action=open]");
    browser.click("#dialog .primary");
    browser.wait("document.querySelector('[data-action=close]')");
    assert_eq!(site.supervisor.snapshot("thumbnail")["breaker"], "forced_open");
    browser.click("[data-action=close]");
    browser.click("#dialog .primary");
    browser.wait("document.querySelector('[data-action=open]')");
    let before = site.supervisor.worker_pids("thumbnail");
    browser.click("[data-action=restart]");
    browser.click("#dialog .primary");
    wait_for("the workers are others", || {
        let now = site.supervisor.worker_pids("thumbnail");
        (now.len() == 2 && now.iter().all(|pid| !before.contains(pid))).then_some(())
    });
    browser.press(&["\u{e00c}"]);
    browser.wait("document.querySelector('#details').hidden");

    // The configuration: what would change comes first.
    let keys = keys(&site.address);
    site.supervisor.configure(&keys, &BULKHEADS.replace("max_queue = 10", "max_queue = 11"));
    browser.click("#reload");
    browser.wait("document.querySelector('#dialog').textContent.includes('sql changed: max_queue')");
    assert_eq!(site.supervisor.number("sql", "queue_capacity"), 10);
    browser.click("#dialog .primary");
    site.supervisor.wait_number("sql", "queue_capacity", 11);
    browser.wait("!document.querySelector('#dialog').open");
    site.supervisor.configure(&keys, "[bulkhead.x]\nnonsense = 1\n");
    browser.click("#reload");
    browser.wait("document.querySelector('#dialog').textContent.includes('unknown key')");
    assert_eq!(browser.value("document.querySelector('#dialog .primary')"), Value::Null);
    let errors = browser.log("browser");
    // The browser itself remarks on answers that are errors, which are what was asked for here.
    let own: Vec<_> = errors.iter().filter(|e| e["level"] == "SEVERE" && e["source"] != "network").collect();
    assert!(own.is_empty(), "{own:#?}");
    check(&site, &browser);
}

#[test]
fn it_comes_back_after_the_supervisor_and_says_so() {
    let Some((mut site, browser)) = open(BULKHEADS) else { return };
    for _ in 0..3 {
        site.crash("thumbnail");
    }
    browser.wait("[...document.querySelectorAll('#feed .kind')].filter((e) => e.textContent === 'job crashed').length === 3");
    site.stop();
    browser.wait("document.querySelector('#link').textContent === 'reconnecting…'");
    browser.wait("!document.querySelector('#trouble').hidden && /\\d+ s/.test(document.querySelector('#link-age').textContent)");
    site.start_again();
    browser.wait(
        "document.querySelector('#link').textContent === 'live' && document.querySelector('#trouble').hidden",
    );
    browser.wait(
        "[...document.querySelectorAll('#feed .fields')].some((e) => e.textContent.includes('started anew'))",
    );
    // Its events have numbers that were there before.
    site.crash("sql");
    browser.wait("[...document.querySelectorAll('#feed .who')].some((e) => e.textContent === 'sql' && e.parentElement.textContent.includes('job crashed'))");
    let negative = browser
        .value("[...document.querySelectorAll('.counts dd')].some((e) => e.textContent.includes('-'))");
    assert_eq!(negative, false);
    check(&site, &browser);
}

#[test]
fn hostile_text_is_shown_and_does_nothing() {
    let Some((site, browser)) = open(BULKHEADS) else { return };
    let client = Client::connect(site.supervisor.socket()).unwrap();
    let hostile = |bulkhead: &str, operation: &str| {
        let job = client.job(bulkhead, format!("{HOSTILE}\n").into_bytes());
        let _ = job.operation(operation).tenant(HOSTILE).send();
    };
    // The program says it to its standard error, and dies.
    hostile("script", HOSTILE);
    hostile("thumbnail", HOSTILE);
    hostile("thumbnail", "abort");
    let shows = |selector: &str| {
        let text = json!(HARMLESS);
        browser.wait(&format!(
            "[...document.querySelectorAll('{selector}')].some((e) => e.textContent.includes({text}))"
        ));
    };
    browser.wait("document.querySelectorAll('#crashes summary').length === 2");
    browser.run("document.querySelectorAll('#crashes summary').forEach((e) => e.click())");
    shows("#crashes .report pre");
    shows("#crashes .report dd");
    browser.wait("[...document.querySelectorAll('#feed .kind')].filter((e) => e.textContent === 'job crashed').length === 2");
    browser.run("document.querySelectorAll('#feed summary').forEach((e) => e.click())");
    shows("#feed .fields-all dd");
    shows("#feed .fields");
    browser.click(&format!("{} h3 button", card("thumbnail")));
    shows("#details td");
    browser.press(&["\u{e00c}"]);
    browser.click(&format!("{} h3 button", card("script")));
    shows("#details pre");
    let made = "document.querySelectorAll('main img, main script, aside img, aside script, pre *').length";
    assert_eq!(browser.value(made), 0);
    // Even if the page had a mistake, the browser would not run it.
    let tried = browser.run(
        "try { document.body.innerHTML += '<img src=x onerror=window.hacked=1>'; return 'done' } catch (e) { return e.name }",
    );
    assert_eq!(tried, "TypeError");
    browser.log("browser");
    check(&site, &browser);
}

#[test]
fn the_keyboard_is_enough_and_a_phone_is_wide_enough() {
    let Some((site, browser)) = open(BULKHEADS) else { return };
    let focused = || browser.value("document.activeElement.textContent");
    browser.press(&["j"]);
    assert_eq!(focused(), "thumbnail");
    browser.press(&["j", "\u{e015}"]);
    assert_eq!(focused(), "script");
    browser.press(&["j", "k"]);
    assert_eq!(focused(), "sql");
    browser.press(&["\u{e007}"]);
    browser.wait("document.querySelector('#details h2')?.textContent === 'sql'");
    browser.press(&["\u{e00c}"]);
    browser.wait("document.querySelector('#details').hidden");
    assert_eq!(focused(), "sql", "the focus is where it was");
    browser.press(&["?"]);
    browser.wait("document.querySelector('#dialog').open && document.querySelector('#dialog').textContent.includes('Keyboard')");
    browser.press(&["\u{e00c}"]);
    browser.wait("!document.querySelector('#dialog').open");
    browser.press(&["/", "s", "q", "l"]);
    browser.wait("document.querySelectorAll('.card:not([hidden])').length === 1");
    browser.fill("#filter", "");
    browser.press(&["x", "\u{e003}", "\u{e00c}"]);
    browser.wait("document.querySelectorAll('.card:not([hidden])').length === 3");
    browser.press(&["t"]);
    let theme = browser.value("document.documentElement.dataset.theme");
    assert!(theme == "dark" || theme == "light", "{theme}");

    browser.crash_and_narrow(&site);
    check(&site, &browser);
}

/// What is wider than the page can be.
trait Narrow {
    fn crash_and_narrow(&self, site: &Site);
}

impl Narrow for Browser {
    fn crash_and_narrow(&self, site: &Site) {
        site.crash("thumbnail");
        self.wait("document.querySelector('#crashes summary')");
        self.resize(360, 740);
        self.visit(&site.url());
        self.wait(
            "document.querySelectorAll('.card').length === 3 && document.querySelector('#crashes summary')",
        );
        let is_too_wide = "document.documentElement.scrollWidth > 360 || document.body.scrollWidth > 360";
        self.run("document.querySelectorAll('#crashes summary, #feed summary').forEach((e) => e.click())");
        self.wait("document.querySelector('#crashes .report pre, #crashes .report dl')");
        assert_eq!(self.value(is_too_wide), false);
        self.click(&format!("{} h3 button", card("thumbnail")));
        self.wait("document.querySelector('#details h2')");
        assert_eq!(self.value(is_too_wide), false);
        assert_eq!(self.value("document.querySelector('#details').scrollWidth <= 360"), true);
        self.click("[data-action=resize]");
        assert_eq!(
            self.value("document.querySelector('#dialog').getBoundingClientRect().right <= 360"),
            true
        );
    }
}
