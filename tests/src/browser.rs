//! A real headless browser, controlled through the WebDriver protocol. The JSON messages of the protocol are sent with
//! the HTTP client in [`crate::http`].

use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::http::Place;
use crate::{PATIENCE, not_run, wait_for};

/// Command-line flags for the browser. Some of them disable network requests that the browser makes on its own.
const FLAGS: [&str; 11] = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-default-apps",
    "--hide-scrollbars",
];

/// Key of an element reference in a WebDriver response.
const ELEMENT: &str = "element-6066-11e4-a52e-4f735466cecf";

/// A tab in a browser with a new profile. The browser is terminated on drop.
#[derive(Debug)]
pub struct Browser {
    driver: Child,
    place: Place,
    session: String,
    _profile: TempDir,
}

impl Browser {
    /// Starts a browser. If no browser is installed, prints a note and returns `None`.
    pub fn start() -> Option<Self> {
        let (Some(chromium), Some(chromedriver)) = (find("chromium"), find("chromedriver")) else {
            not_run!(
                "the dashboard tests need chromium and chromedriver: \
                 apt-get install chromium chromium-driver"
            );
            return None;
        };
        let profile = tempfile::tempdir().expect("a temporary folder");
        let mut driver = Command::new(chromedriver)
            .arg("--port=0")
            .env("HOME", profile.path())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .process_group(0)
            .spawn()
            .expect("chromedriver runs");
        let place = Place::Tcp(address(&mut driver));
        let mut flags: Vec<String> = FLAGS.map(str::to_owned).into();
        flags.push(format!("--user-data-dir={}", profile.path().display()));
        let wanted = json!({"capabilities": {"alwaysMatch": {
            "goog:chromeOptions": {"binary": chromium, "args": flags},
            "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"},
        }}});
        let mut browser = Self { driver, place, session: String::new(), _profile: profile };
        let begun = browser.send("POST", "/session", &wanted);
        browser.session = format!("/session/{}", begun["sessionId"].as_str().expect("a session"));
        Some(browser)
    }

    fn send(&self, method: &str, path: &str, body: &Value) -> Value {
        let body = if method == "GET" { String::new() } else { body.to_string() };
        let answer = self.place.ask(method, path, &["Content-Type: application/json"], body.as_bytes());
        let said = answer.json();
        assert_eq!(answer.status, 200, "{method} {path} {body}: {}", said["value"]["message"]);
        said["value"].clone()
    }

    fn post(&self, path: &str, body: &Value) -> Value {
        self.send("POST", &format!("{}{path}", self.session), body)
    }

    /// Opens a page and waits until the page is loaded.
    pub fn visit(&self, url: &str) {
        self.post("/url", &json!({"url": url}));
    }

    /// Runs a script as the body of a function in the page, and returns the function's result.
    pub fn run(&self, script: &str) -> Value {
        self.post("/execute/sync", &json!({"script": script, "args": []}))
    }

    /// Returns the value of a JavaScript expression in the page.
    pub fn value(&self, expression: &str) -> Value {
        self.run(&format!("return {expression}"))
    }

    /// Returns the text of the first element that matches the selector.
    pub fn text(&self, selector: &str) -> String {
        let text = self.value(&format!("document.querySelector({})?.textContent ?? ''", json!(selector)));
        text.as_str().expect("text").to_owned()
    }

    /// Waits until a JavaScript expression is true in the page.
    #[track_caller]
    pub fn wait(&self, expression: &str) {
        wait_for(expression, || (self.value(&format!("Boolean({expression})")) == true).then_some(()));
    }

    /// Clicks the first element that matches the selector.
    pub fn click(&self, selector: &str) {
        let element = self.element(selector);
        self.post(&format!("/element/{element}/click"), &json!({}));
    }

    /// Replaces the text of an input field.
    pub fn fill(&self, selector: &str, text: &str) {
        let element = self.element(selector);
        self.post(&format!("/element/{element}/clear"), &json!({}));
        self.post(&format!("/element/{element}/value"), &json!({"text": text}));
    }

    fn element(&self, selector: &str) -> String {
        let found = self.post("/element", &json!({"using": "css selector", "value": selector}));
        found[ELEMENT].as_str().expect("an element").to_owned()
    }

    /// Presses keys one after another in the focused element.
    pub fn press(&self, keys: &[&str]) {
        let pressed =
            keys.iter().flat_map(|key| ["keyDown", "keyUp"].map(|kind| json!({"type": kind, "value": key})));
        let actions: Vec<Value> = pressed.collect();
        self.post("/actions", &json!({"actions": [{"type": "key", "id": "keys", "actions": actions}]}));
    }

    /// Runs a Chrome DevTools Protocol command.
    pub fn command(&self, name: &str, parameters: &Value) -> Value {
        self.post("/goog/cdp/execute", &json!({"cmd": name, "params": parameters}))
    }

    /// Sets the size of the page, in CSS pixels.
    pub fn resize(&self, width: u32, height: u32) {
        let metrics =
            json!({"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600});
        self.command("Emulation.setDeviceMetricsOverride", &metrics);
    }

    /// Sets the preferred colour scheme to `dark` or `light`.
    pub fn prefer(&self, scheme: &str) {
        let features = json!({"features": [{"name": "prefers-color-scheme", "value": scheme}]});
        self.command("Emulation.setEmulatedMedia", &features);
    }

    /// Returns a screenshot in PNG format.
    pub fn picture(&self) -> Vec<u8> {
        let taken = self.send("GET", &format!("{}/screenshot", self.session), &Value::Null);
        STANDARD.decode(taken.as_str().expect("base64")).expect("base64")
    }

    /// Returns the log entries since the last call. `kind` is `browser` for console messages, or `performance` for
    /// requests.
    pub fn log(&self, kind: &str) -> Vec<Value> {
        let entries = self.post("/se/log", &json!({"type": kind}));
        entries.as_array().expect("entries").clone()
    }
}

/// Finds a program in `PATH`.
fn find(name: &str) -> Option<PathBuf> {
    let search_path = std::env::var_os("PATH")?;
    std::env::split_paths(&search_path).map(|folder| folder.join(name)).find(|path| path.is_file())
}

/// Reads the driver's address from the driver's standard output, in a separate thread because the read has no time
/// limit.
fn address(driver: &mut Child) -> SocketAddr {
    let said = BufReader::new(driver.stdout.take().expect("a pipe"));
    let (sender, receiver) = mpsc::channel();
    std::thread::spawn(move || {
        let mut lines = said.lines().map_while(Result::ok);
        let port = lines.find_map(|line| Some(line.split_once("successfully on port ")?.1.to_owned()));
        let _ = sender.send(port);
    });
    let port = receiver.recv_timeout(PATIENCE).expect("chromedriver prints its port within the time limit");
    let port = port.expect("chromedriver exited without printing its port");
    let port = port.trim().trim_end_matches('.').parse().expect("a port");
    SocketAddr::from(([127, 0, 0, 1], port))
}

impl Drop for Browser {
    fn drop(&mut self) {
        if !self.session.is_empty() && !std::thread::panicking() {
            self.place.ask("DELETE", &self.session, &[], b"");
        }
        // The process group includes the browser.
        let _ = killpg(Pid::from_raw(self.driver.id() as i32), Signal::SIGKILL);
        let _ = self.driver.wait();
    }
}
