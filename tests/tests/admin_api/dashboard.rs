//! The dashboard in a real browser, with a real supervisor and real workers.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use bulkhead_client::blocking::Client;
use bulkhead_tests::browser::Browser;
use bulkhead_tests::http::Place;
use bulkhead_tests::{Supervisor, heavy, programs, wait_for};
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
max_queue = 20
env = { PATH = "/usr/bin:/bin" }
"#;

/// Text that would run a script if the page treated it as markup. The text also contains terminal control characters.
const HOSTILE: &str = "<img src=x onerror=window.hacked=1><script>window.hacked=1</script>\u{202e}\u{1b}[31m";
/// The text `HOSTILE` as it must appear on the page.
const HARMLESS: &str =
    "<img src=x onerror=window.hacked=1><script>window.hacked=1</script>\\u202e\\u001b[31m";

/// A supervisor that serves the dashboard, and the address of the dashboard.
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
        // A restarted supervisor must listen on the same address, so the configuration names the port.
        supervisor.configure(&keys(&address), bulkheads);
        Self { supervisor, place, address }
    }

    /// Returns the URL of the dashboard. The URL contains the token, so the browser does not ask for it.
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

/// Starts a supervisor and a browser that shows the dashboard. Returns `None` if there is no browser.
fn open(bulkheads: &str) -> Option<(Site, Browser)> {
    let browser = Browser::start()?;
    let site = Site::start(bulkheads);
    browser.resize(1440, 1000);
    // Discards the requests that were logged before the page is loaded.
    browser.log("performance");
    browser.visit(&site.url());
    browser.wait(
        "document.querySelectorAll('.card').length && document.querySelector('#link').textContent === 'live'",
    );
    Some((site, browser))
}

/// Checks that the page logged no errors and sent requests only to the supervisor. Ignores requests that failed while
/// the supervisor was restarting.
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
        let params = &message["message"]["params"];
        // The browser may still be loading its start pages (chrome:, chrome-untrusted:).
        if params["documentURL"].as_str().is_some_and(|document| document.starts_with("chrome")) {
            continue;
        }
        let url = params["request"]["url"].as_str().unwrap().to_owned();
        let is_own = url.starts_with(&format!("http://{}/", site.address)) || url.starts_with(&site.url());
        assert!(is_own || url.starts_with("data:"), "{url}");
        asked += 1;
    }
    assert!(asked > 3, "the browser made only {asked} requests");
    assert_eq!(browser.value("window.hacked ?? null"), Value::Null);
}

fn card(name: &str) -> String {
    format!(".card[data-name={name}]")
}

#[test]
fn dashboard_shows_every_bulkhead_and_new_crashes() {
    let _turn = heavy();
    let Some((site, browser)) = open(BULKHEADS) else { return };
    let names = browser.value("[...document.querySelectorAll('.card h3')].map((e) => e.textContent)");
    assert_eq!(names, json!(["thumbnail", "sql", "script"]));
    assert_eq!(browser.text(&format!("{} .badge", card("thumbnail"))), "ready");
    browser.wait(&format!(
        "document.querySelector('{} .gauge .value').textContent === '0 / 4'",
        card("thumbnail")
    ));
    // A card shows a breaker only if one is configured.
    browser.wait(&format!(
        "document.querySelector('{} .breaker').textContent === 'breaker closed'",
        card("sql")
    ));
    assert_eq!(browser.text(&format!("{} .breaker", card("thumbnail"))), "");

    let began = Instant::now();
    site.crash("thumbnail");
    browser
        .wait("[...document.querySelectorAll('#feed .kind')].some((e) => e.textContent === 'job crashed')");
    println!("the page showed the crash {:?} after the job was sent", began.elapsed());
    browser.wait("document.querySelector('#crashes .cause')?.textContent === 'SIGABRT'");
    browser.click("#crashes summary");
    browser.wait("document.querySelector('#crashes .report')?.textContent.includes('the suspected cause')");

    // The card counts running jobs.
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
fn dashboard_lists_failing_bulkheads_first() {
    let _turn = heavy();
    let broken =
        "[bulkhead.zz]\ncommand = [\"MISBEHAVE\", \"exit-at-start\"]\nrestart = { policy = \"never\" }\n";
    let Some((site, browser)) = open(&format!("{BULKHEADS}{broken}")) else { return };
    let client = Client::connect(site.supervisor.socket()).unwrap();
    let service = format!("{} .service", card("thumbnail"));
    assert_eq!(browser.text(&service), "service ok");
    // At the deadline, some of these jobs are still queued and some are running.
    let job = client.job("sql", "").operation("yield").deadline(Duration::from_secs(1));
    let jobs: Vec<_> = (0..11).map(|_| job.clone().start().unwrap()).collect();
    for job in jobs {
        job.wait().unwrap_err();
    }
    browser.wait(
        "[...document.querySelectorAll('.card h3')].map((e) => e.textContent).join() === 'sql,zz,thumbnail,script'",
    );
    assert_eq!(browser.text(&format!("{} .service", card("sql"))), "service failing");
    // The exact count varies, because the page can lag behind and the last job can run before its deadline.
    browser.wait(&format!(
        "/deadline_exceeded\\/queued: \\d+ of 11/.test(document.querySelector('{} .why')?.textContent)",
        card("sql")
    ));
    check(&site, &browser);
}

/// The names of the elements whose content is wider than the page or than their card.
const OVERFLOWING: &str = "[document.documentElement, document.body, ...document.querySelectorAll('main > *, .card, .card *')]\
     .filter((e) => e.clientWidth && (e.scrollWidth > e.clientWidth && getComputedStyle(e).overflowX === 'visible'\
     || e.getBoundingClientRect().right > innerWidth)).map((e) => `${e.tagName} ${e.className}`)";

#[test]
fn dashboard_summarises_problems_and_folds_healthy_bulkheads() {
    const HEALTHY: u32 = 39;
    let _turn = heavy();
    let mut bulkheads =
        "[bulkhead.zz]\ncommand = [\"MISBEHAVE\", \"exit-at-start\"]\nrestart = { policy = \"never\" }\n"
            .to_owned();
    for number in 0..HEALTHY {
        bulkheads += &format!("[bulkhead.w{number}]\ncommand = [\"MISBEHAVE\"]\n");
    }
    let Some((site, browser)) = open(&bulkheads) else { return };
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap();
    let title = format!("(1) {} – Bulkhead", host.trim());
    browser.wait(&format!("document.title === {}", json!(title)));
    assert_eq!(browser.text("#host"), host.trim());
    browser.wait("document.querySelector('#summary').textContent === '1 failing, 1 crash in 10 min'");
    let names = |place: &str| {
        browser.value(&format!(
            "[...document.querySelectorAll('{place} .card h3')].map((e) => e.textContent).join()"
        ))
    };
    assert_eq!(names("#cards"), "zz");
    assert_eq!(names("#folded"), (0..HEALTHY).map(|n| format!("w{n}")).collect::<Vec<_>>().join(","));
    assert_eq!(browser.text("#fold-title"), format!("{HEALTHY} other healthy bulkheads"));
    // A search shows matching bulkheads even if they are folded.
    assert_eq!(browser.value("document.querySelector('#fold').open"), false);
    browser.fill("#filter", "w38");
    browser.wait("document.querySelector('#fold').open && document.querySelectorAll('.card:not([hidden])').length === 1");
    browser.run(
        "const f = document.querySelector('#filter'); f.value = ''; f.dispatchEvent(new Event('input'))",
    );
    browser.wait("!document.querySelector('#fold').open");
    browser.run("document.querySelector('#fold').open = true");
    for width in [1440, 1280, 360] {
        browser.resize(width, 900);
        assert_eq!(browser.value("document.querySelector('.card[data-name=w0]').checkVisibility()"), true);
        assert_eq!(browser.value(OVERFLOWING), json!([]), "at a width of {width}");
    }
    browser.resize(1440, 1000);
    browser.run("document.querySelector('#fold').open = false");

    // Two identical crashes form one group of events.
    for _ in 0..2 {
        site.place.job("w3", "abort", &[BEARER], b"a bad payload").problem(502);
    }
    browser.wait(
        "[...document.querySelector('#groups').rows].some((row) => [...row.cells].slice(0, 4).map((e) => e.textContent)\
         .join('|') === '2 ×|job crashed|w3|killed by SIGABRT')",
    );
    browser.wait("document.querySelector('#summary').textContent.includes('3 crashes in 10 min')");
    browser.wait("document.querySelectorAll('#crashes summary').length > 1");
    browser.run("[...document.querySelectorAll('#crashes summary')].find((e) => e.textContent.includes('w3')).click()");
    browser.wait("[...document.querySelectorAll('#crashes .report pre')].some((e) => e.textContent === 'a bad payload')");
    browser.click("#crashes .report .actions button");
    browser.wait("document.querySelector('#dialog').open");
    assert!(site.supervisor.events("crash_replayed").is_empty(), "the user has not confirmed the replay");
    browser.click("#dialog .primary");
    browser.wait("document.querySelector('#crashes .verdict').textContent.startsWith('The job crashed in the same way.')");
    check(&site, &browser);
}

#[test]
fn dashboard_asks_for_confirmation_before_changes() {
    let _turn = heavy();
    let Some((site, browser)) = open(BULKHEADS) else { return };
    let limit = |name: &str| site.supervisor.number(name, "limit");
    site.supervisor.wait_number("thumbnail", "limit", 4);
    browser.click(&format!("{} h3 button", card("thumbnail")));
    browser.wait("document.querySelector('#details h2')?.textContent === 'thumbnail'");
    browser.wait("document.querySelectorAll('#details [aria-label=Workers] tbody tr').length === 2");

    browser.wait("document.querySelector('#details .advice').textContent.startsWith('Observed for')");

    // Dialogs can be cancelled.
    browser.click("[data-action=resize]");
    browser.fill("#dialog [name=max_in_flight]", "9");
    browser.click("#dialog .actions button[type=button]");
    browser.wait("!document.querySelector('#dialog').open");
    browser.click("[data-action=drain]");
    assert!(browser.text("#dialog").contains("rejected as draining"));
    browser.press(&["\u{e00c}"]);
    browser.wait("!document.querySelector('#dialog').open");
    assert_eq!(browser.text("#details h2"), "thumbnail", "Esc closes only the dialog");
    assert_eq!(
        (limit("thumbnail"), site.supervisor.state("thumbnail").state.to_string()),
        (4, "ready".to_owned())
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

    // If the supervisor rejects the change, the dialog stays open for a correction.
    browser.click("[data-action=resize]");
    browser.fill("#dialog [name=processes]", "100000");
    browser.click("#dialog .primary");
    browser.wait("document.querySelector('#dialog .error')?.textContent.includes('processes must be')");
    browser.press(&["\u{e00c}"]);

    browser.click("[data-action=drain]");
    browser.click("#dialog .primary");
    browser.wait("document.querySelector('[data-action=resume]')");
    assert_eq!(site.supervisor.state("thumbnail").state.as_str(), "draining");
    browser.click("[data-action=resume]");
    browser.click("#dialog .primary");
    browser.wait("document.querySelector('[data-action=drain]')");
    browser.click("[data-action=open]");
    browser.click("#dialog .primary");
    browser.wait("document.querySelector('[data-action=close]')");
    assert_eq!(site.supervisor.state("thumbnail").breaker.as_str(), "forced_open");
    browser.click("[data-action=close]");
    browser.click("#dialog .primary");
    browser.wait("document.querySelector('[data-action=open]')");
    let before = site.supervisor.worker_pids("thumbnail");
    browser.click("[data-action=restart]");
    browser.click("#dialog .primary");
    wait_for("both workers are replaced", || {
        let now = site.supervisor.worker_pids("thumbnail");
        (now.len() == 2 && now.iter().all(|pid| !before.contains(pid))).then_some(())
    });
    browser.press(&["\u{e00c}"]);
    browser.wait("document.querySelector('#details').hidden");

    // The reload dialog lists the changes before they are applied.
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
    // The browser logs each error response. This test provokes such responses, so these entries are not page errors.
    let own: Vec<_> = errors.iter().filter(|e| e["level"] == "SEVERE" && e["source"] != "network").collect();
    assert!(own.is_empty(), "{own:#?}");
    check(&site, &browser);
}

#[test]
fn dashboard_reconnects_after_supervisor_restart() {
    let _turn = heavy();
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
        "[...document.querySelectorAll('#feed .fields')].some((e) => e.textContent.includes('was restarted'))",
    );
    // The restarted supervisor numbers its events from 1, so the page sees the same numbers again.
    site.crash("sql");
    browser.wait("[...document.querySelectorAll('#feed .who')].some((e) => e.textContent === 'sql' && e.parentElement.textContent.includes('job crashed'))");
    let negative = browser
        .value("[...document.querySelectorAll('.counts dd')].some((e) => e.textContent.includes('-'))");
    assert_eq!(negative, false);
    check(&site, &browser);
}

#[test]
fn dashboard_shows_markup_in_job_data_as_text() {
    let _turn = heavy();
    let Some((site, browser)) = open(BULKHEADS) else { return };
    let client = Client::connect(site.supervisor.socket()).unwrap();
    let hostile = |bulkhead: &str, operation: &str| {
        let job = client.job(bulkhead, format!("{HOSTILE}\n").into_bytes());
        let _ = job.operation(operation).tenant(HOSTILE).send();
    };
    // The program writes the payload to standard error and dies.
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
    // The page's Trusted Types policy makes the browser reject injected markup.
    let tried = browser.run(
        "try { document.body.innerHTML += '<img src=x onerror=window.hacked=1>'; return 'done' } catch (e) { return e.name }",
    );
    assert_eq!(tried, "TypeError");
    browser.log("browser");
    check(&site, &browser);
}

#[test]
fn dashboard_works_with_keyboard_and_on_phone() {
    let _turn = heavy();
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
    assert_eq!(focused(), "sql", "the focus returns to the card");
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

    look_at_it_on_a_phone(&site, &browser);
    check(&site, &browser);
}

#[test]
fn dashboard_keeps_at_most_500_events() {
    let _turn = heavy();
    let Some((site, browser)) = open(BULKHEADS) else { return };
    let threads = (0..4).map(|_| {
        let socket = site.supervisor.socket();
        std::thread::spawn(move || {
            let client = Client::connect(socket).unwrap();
            for _ in 0..150 {
                client.job("script", "").send().unwrap_err();
            }
        })
    });
    threads.collect::<Vec<_>>().into_iter().for_each(|thread| thread.join().unwrap());
    browser.wait("Number(document.querySelector('#feed-count').textContent.replace(/[^0-9]/g, '')) > 500 && document.querySelector('#feed').children.length === 500");
    // The failures moved this card to the front.
    browser.wait("document.querySelector('.card h3').textContent === 'script'");
    browser.press(&["j"]);
    assert_eq!(browser.value("document.activeElement.textContent"), "script");
    // The filter hides the events of other bulkheads.
    browser.run("const s = document.querySelector('#feed-bulkhead'); s.value = 'sql'; s.dispatchEvent(new Event('change'))");
    browser.wait("[...document.querySelectorAll('#feed .who')].every((e) => e.textContent === 'sql')");
    assert_ne!(browser.value("document.querySelector('#feed').children.length"), 0);
    check(&site, &browser);
}

/// Checks that the page has no horizontal overflow at the width of a phone.
fn look_at_it_on_a_phone(site: &Site, browser: &Browser) {
    site.crash("thumbnail");
    browser.wait("document.querySelector('#crashes summary')");
    browser.resize(360, 740);
    browser.visit(&site.url());
    browser.wait(
        "document.querySelectorAll('.card').length === 3 && document.querySelector('#crashes summary')",
    );
    let is_too_wide = "document.documentElement.scrollWidth > 360 || document.body.scrollWidth > 360";
    browser.run("document.querySelectorAll('#crashes summary, #feed summary').forEach((e) => e.click())");
    browser.wait("document.querySelector('#crashes .report pre, #crashes .report dl')");
    assert_eq!(browser.value(is_too_wide), false);
    browser.click(&format!("{} h3 button", card("thumbnail")));
    browser.wait("document.querySelector('#details h2')");
    assert_eq!(browser.value(is_too_wide), false);
    assert_eq!(browser.value("document.querySelector('#details').scrollWidth <= 360"), true);
    browser.click("[data-action=resize]");
    assert_eq!(browser.value("document.querySelector('#dialog').getBoundingClientRect().right <= 360"), true);
}

// Screenshots for the documentation.

const SHOWN: &str = r#"
[defaults]
restart = { backoff = "10ms", max = 1000, within = "10s" }
[bulkhead.thumbnail]
command = ["MISBEHAVE"]
processes = 2
max_in_flight = 4
max_queue = 40
[bulkhead.ocr]
command = ["MISBEHAVE"]
processes = 2
max_in_flight = 1
max_queue = 12
[bulkhead.sql-reports]
command = ["MISBEHAVE"]
max_in_flight = 6
max_queue = 30
breaker = { window = "10s", min_calls = 20, failure_rate = 0.5 }
rate_limit = { per_second = 90, burst = 20 }
[bulkhead.plugin]
command = ["MISBEHAVE"]
processes = 2
max_queue = 16
[bulkhead.geoip]
command = ["MISBEHAVE"]
max_in_flight = 8
max_queue = 50
[bulkhead.mail-filter]
exec = ["cat"]
max_in_flight = 2
max_queue = 10
"#;

/// Threads that send jobs until `end` is called. `level` is the percentage of these threads that are active.
struct Load {
    level: Arc<AtomicU32>,
    lanes: Vec<JoinHandle<()>>,
}

/// Value of `level` that stops the threads.
const OVER: u32 = u32::MAX;

impl Load {
    /// Starts `count` threads that send jobs with the given operation and payload, and sleep for `pause` milliseconds
    /// after each job.
    fn begin(
        site: &Site,
        bulkhead: &'static str,
        count: u32,
        operation: &'static str,
        payload: &'static str,
        pause: u64,
    ) -> Self {
        let level = Arc::new(AtomicU32::new(100));
        let lanes = (0..count).map(|lane| {
            let (level, socket) = (level.clone(), site.supervisor.socket());
            std::thread::spawn(move || {
                let client = Client::connect(socket).unwrap();
                let tenant = ["acme", "globex", "initech", "umbrella"][lane as usize % 4];
                loop {
                    match level.load(Ordering::Relaxed) {
                        OVER => return,
                        now if lane * 100 < now * count => {
                            let _ = client.job(bulkhead, payload).operation(operation).tenant(tenant).send();
                            std::thread::sleep(Duration::from_millis(pause));
                        }
                        _ => std::thread::sleep(Duration::from_millis(50)),
                    }
                }
            })
        });
        Self { lanes: lanes.collect(), level }
    }

    fn set(&self, level: u32) {
        self.level.store(level, Ordering::Relaxed);
    }

    fn end(self) {
        self.set(OVER);
        self.lanes.into_iter().for_each(|lane| lane.join().unwrap());
    }
}

fn save(browser: &Browser, name: &str) {
    let picture = browser.picture();
    assert!(picture.len() < 300_000, "{name} has {} bytes", picture.len());
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/images");
    std::fs::create_dir_all(&folder).unwrap();
    std::fs::write(folder.join(name), picture).unwrap();
}

/// Saves a screenshot that is not part of the documentation.
fn save_temporarily(browser: &Browser, name: &str) {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    std::fs::write(&path, browser.picture()).unwrap();
    println!("saved {}", path.display());
}

#[test]
fn saves_screenshots_of_many_bulkheads() {
    if std::env::var_os("UPDATE_SCREENSHOTS").is_none() {
        return;
    }
    let many = (0..34).map(|n| format!("[bulkhead.service-{n}]\ncommand = [\"MISBEHAVE\"]\n"));
    let Some((site, browser)) = open(&(SHOWN.to_owned() + &many.collect::<String>())) else { return };
    let geoip = Load::begin(&site, "geoip", 3, "echo", "127.0.0.1", 3);
    let crashing = Load::begin(&site, "plugin", 2, "abort", "", 100);
    let slow = Load::begin(&site, "ocr", 16, "sleep", "60", 10);
    for (theme, width, height) in [("light", 1440, 1000), ("dark", 1440, 1000), ("light", 360, 740)] {
        browser.prefer(theme);
        browser.resize(width, height);
        for (is_open, state) in [(false, "folded"), (true, "open")] {
            browser.run(&format!("document.querySelector('#fold').open = {is_open}"));
            std::thread::sleep(Duration::from_secs(5));
            save_temporarily(&browser, &format!("dashboard-40-{theme}-{width}-{state}.png"));
        }
    }
    for load in [geoip, crashing, slow] {
        load.end();
    }
}

#[test]
fn updates_documentation_screenshots() {
    if std::env::var_os("UPDATE_SCREENSHOTS").is_none() {
        return;
    }
    let Some((site, browser)) = open(SHOWN) else { return };
    browser.prefer("light");
    browser.resize(1280, 900);
    let thumbnail = Load::begin(&site, "thumbnail", 10, "sleep", "9", 4);
    let ocr = Load::begin(&site, "ocr", 16, "sleep", "60", 10);
    let sql = Load::begin(&site, "sql-reports", 5, "sleep", "22", 25);
    let failing = Load::begin(&site, "sql-reports", 1, "fail", "", 700);
    let geoip = Load::begin(&site, "geoip", 3, "echo", "127.0.0.1", 3);
    let mail = Load::begin(&site, "mail-filter", 2, "", "hello", 150);
    let plugin = Load::begin(&site, "plugin", 2, "sleep", "20", 90);
    for (seconds, of_thumbnail, of_ocr, of_sql) in [
        (14, 30, 6, 60),
        (12, 55, 12, 40),
        (10, 80, 20, 80),
        (12, 60, 50, 100),
        (12, 100, 75, 60),
        (14, 90, 100, 80),
        (10, 60, 70, 100),
    ] {
        thumbnail.set(of_thumbnail);
        ocr.set(of_ocr);
        sql.set(of_sql);
        std::thread::sleep(Duration::from_secs(seconds));
    }
    save(&browser, "dashboard-load.png");
    browser.click(&format!("{} h3 button", card("thumbnail")));
    browser.wait("document.querySelector('#details pre').textContent.length > 0");
    save(&browser, "dashboard-details.png");
    browser.press(&["\u{e00c}"]);
    browser.run("document.activeElement.blur()");

    // Shows a storm of crashes in the dark theme.
    browser.prefer("dark");
    let crashing = Load::begin(&site, "plugin", 4, "abort", "", 30);
    let rarely = Load::begin(&site, "thumbnail", 1, "segv", "", 2500);
    std::thread::sleep(Duration::from_secs(12));
    browser.resize(1280, 960);
    std::thread::sleep(Duration::from_secs(2));
    save(&browser, "dashboard-crashes.png");
    browser.resize(360, 740);
    std::thread::sleep(Duration::from_secs(2));
    save(&browser, "dashboard-phone.png");
    for load in [thumbnail, ocr, sql, failing, geoip, mail, plugin, crashing, rarely] {
        load.end();
    }
    let Some((_site, browser)) = open(SHOWN) else { return };
    browser.prefer("light");
    browser.resize(1280, 900);
    std::thread::sleep(Duration::from_secs(5));
    save(&browser, "dashboard-idle.png");
}
