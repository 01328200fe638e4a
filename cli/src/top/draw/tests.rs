//! Tests that draw whole screens into memory.

use ratatui::Terminal;
use ratatui::backend::TestBackend;
use ratatui::crossterm::event::KeyCode;
use serde_json::{Value, json};

use super::*;
use crate::output::Failure;
use crate::top::app::tests::{press, sample};
use crate::top::sample::Sample;

const EVIL: &str = "\u{1b}]0;owned\u{7}\u{1b}[2J\u{202e}\u{9b}31m\nevil";

fn snapshot(name: &str, state: &str, in_flight: u64) -> Value {
    let worker = |pid: u64| {
        json!({
            "pid": pid, "state": "busy", "uptime_ms": 61_000, "in_flight": 1, "served": 12, "restarts": 1,
            "rss_bytes": 5 << 20, "last_exit": EVIL,
        })
    };
    json!({
        "name": name, "state": state, "detail": (state != "ready").then_some(EVIL), "limit": 4,
        "service": "degraded", "service_cause": "deadline_exceeded/running: 3 of 20",
        "in_flight": in_flight, "queued": 3, "queue_capacity": 100, "done": 10, "failed": 2, "crashed": 1,
        "rejected": {"queue_full": 7, "rate_limited": 2}, "restarts": 1, "breaker": "closed", "has_breaker": true,
        "latency_ms": {"run": {"p50": 1.5, "p99": 20.0}},
        "tenants": [{"name": "acme", "in_flight": 1, "queued": 2, "submitted": 33, "rejected": 4}, {"name": EVIL}],
        "workers": [worker(4711), worker(4712)],
    })
}

fn event(seq: u64, bulkhead: &str) -> Value {
    json!({
        "at": "2026-11-21T14:07:35.187Z", "seq": seq, "severity": "warning", "kind": "worker_exited",
        "bulkhead": bulkhead, "message": EVIL,
    })
}

fn app() -> (App, Instant) {
    let start = Instant::now();
    let all = [snapshot("thumbnail", "ready", 3), snapshot("ocr", "degraded", 0)];
    let names = ["thumbnail", "ocr", "ocr"];
    let events = (1..).zip(names).filter_map(|(seq, name)| Event::new(&event(seq, name))).collect();
    let first = Sample { events, ..sample(start, &all) };
    (App::new(first, Duration::from_secs(1), "/run/bulkhead/admin.sock".to_owned()), start)
}

fn screen(app: &mut App, now: Instant, width: u16, height: u16) -> Vec<String> {
    let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
    terminal.draw(|frame| draw(frame.buffer_mut(), app, now)).unwrap();
    let buffer = terminal.backend().buffer().clone();
    let symbols = buffer.content.iter().map(|cell| cell.symbol());
    for symbol in symbols {
        assert!(!symbol.contains(char::is_control) && !symbol.contains('\u{202e}'), "{symbol:?}");
    }
    let line = |row: u16| (0..width).map(|x| buffer[(x, row)].symbol()).collect::<String>();
    (0..height).map(|row| line(row).trim_end().to_owned()).collect()
}

#[test]
fn screen_shows_list_events_and_help_line() {
    let (mut app, now) = app();
    let lines = screen(&mut app, now, 80, 24);
    assert_eq!(lines[0], "bulkhead top  every 1s  2 bulkheads, 1 not ready, 2 not ok");
    let head = "NAME      STATE    SERVICE  INFLIGHT QUEUE OK/s REJ/s FAIL/s LATE/s CRASH/s";
    assert_eq!(lines[1], head);
    assert_eq!(lines[2], "ocr       degraded degraded      0/4 3/100    -     -      -      -       -");
    assert_eq!(lines[3], "thumbnail ready    degraded      3/4 3/100    -     -      -      -       -");
    let pane = lines.iter().position(|line| line == "EVENTS").unwrap();
    assert!(lines[pane + 1].starts_with("14:07:35 warning  worker_exited thumbnail message="), "{lines:#?}");
    assert!(lines[pane + 3].contains("worker_exited ocr"));
    assert!(lines[23].contains("? help") && lines[23].contains("sort: worst"), "{}", lines[23]);
}

#[test]
fn wide_terminal_shows_more_columns() {
    let (mut app, now) = app();
    let lines = screen(&mut app, now, 200, 60);
    for head in ["RESTARTS", "BREAKER", "P50", "P99", "WORKERS"] {
        assert!(lines[1].contains(head), "{}", lines[1]);
    }
    assert!(lines[3].contains("closed") && lines[3].contains("20.00ms"), "{}", lines[3]);
    let lines = screen(&mut app, now, 40, 10);
    assert_eq!(lines[1], "NAME      STATE    SERVICE  INFLIGHT");
    assert!(lines[3].starts_with("thumbnail ready    degraded      3/4"), "{lines:#?}");
    assert!(lines.iter().any(|line| line == "EVENTS"), "{lines:#?}");
}

#[test]
fn bulkhead_page_shows_workers_tenants_and_events() {
    let (mut app, now) = app();
    press(&mut app, KeyCode::Enter);
    let lines = screen(&mut app, now, 80, 24);
    let has = |part: &str| lines.iter().any(|line| line.contains(part));
    for part in [
        "ocr  degraded",
        "running: 3 of 20",
        "rejected  queue_full 7  rate_limited 2",
        "acme",
        "run       p50 1.50ms",
        "\\u{1b}",
    ] {
        assert!(has(part), "{part}: {lines:#?}");
    }
    let head = lines.iter().position(|line| line.starts_with("PID  STATE UPTIME INFLIGHT SERVED")).unwrap();
    assert!(
        lines[head + 1].starts_with("4711 busy  1m1s   1        12     1        5.0MiB \\u{1b}"),
        "{lines:#?}"
    );
    assert!(lines[head + 2].starts_with("4712 busy"), "{lines:#?}");
    assert!(
        !has("worker_exited thumbnail") && has("worker_exited ocr"),
        "only events of this bulkhead: {lines:#?}"
    );
    let small = screen(&mut app, now, 40, 10);
    assert!(
        small.iter().any(|line| line.starts_with("4711")),
        "a small page shows the workers first: {small:#?}"
    );
    // Scrolling stops at the last worker.
    press(&mut app, KeyCode::End);
    let small = screen(&mut app, now, 40, 8);
    assert!(small.iter().any(|line| line.starts_with("4712")), "{small:#?}");
    app.store(Ok(sample(now, &[])));
    assert!(screen(&mut app, now, 80, 24)[1].contains("ocr no longer exists"));
}

#[test]
fn unreachable_supervisor_leaves_last_state_dimmed() {
    let (mut app, start) = app();
    app.store(Err(Failure::new(69, "failed to reach the admin socket: refused")));
    let now = start + Duration::from_secs(75);
    let lines = screen(&mut app, now, 80, 24);
    assert!(lines[0].contains("NOT REACHABLE for 1m 15s"), "{}", lines[0]);
    assert!(lines[3].starts_with("thumbnail ready"), "the last state stays visible");
    assert_eq!(lines[23], "failed to reach the admin socket: refused");
    let mut buffer = Buffer::empty(Rect::new(0, 0, 80, 24));
    draw(&mut buffer, &mut app, now);
    assert!(buffer[(0, 3)].modifier.contains(Modifier::DIM));
    app.store(Ok(sample(now, &[snapshot("thumbnail", "ready", 0)])));
    buffer.reset();
    draw(&mut buffer, &mut app, now);
    assert!(!buffer[(0, 2)].modifier.contains(Modifier::DIM), "a new sample ends the dimming");
    assert!(screen(&mut app, now + Duration::from_secs(9), 80, 24)[0].contains("NO RESPONSE for 9s"));
    press(&mut app, KeyCode::Char('p'));
    assert!(screen(&mut app, now, 80, 24)[0].contains("PAUSED"));
}

#[test]
fn screen_shows_help_and_filter_and_empty_list() {
    let (mut app, now) = app();
    press(&mut app, KeyCode::Char('?'));
    let lines = screen(&mut app, now, 80, 24);
    assert!(lines.iter().any(|line| line.contains("sort by severity, name")), "{lines:#?}");
    assert!(lines[23].contains("/run/bulkhead/admin.sock"), "{}", lines[23]);
    press(&mut app, KeyCode::Esc);
    press(&mut app, KeyCode::Char('/'));
    press(&mut app, KeyCode::Char('x'));
    let lines = screen(&mut app, now, 80, 24);
    assert!(lines[23].starts_with("/x_") && lines[2] == "no name matches the filter", "{lines:#?}");
    let nothing = sample(now, &[]);
    app.store(Ok(nothing));
    assert_eq!(screen(&mut app, now, 80, 24)[2], "there are no bulkheads");
}

#[test]
fn screen_can_be_drawn_at_any_size() {
    let (mut app, start) = app();
    let many: Vec<Value> =
        (0..30).map(|n| snapshot(&format!("東京-{n}-{}", "n".repeat(40)), "ready", n)).collect();
    let lost = start + Duration::from_secs(9);
    for keys in [&[][..], &[KeyCode::End], &[KeyCode::Enter, KeyCode::End], &[KeyCode::Char('?')]] {
        for &key in keys {
            press(&mut app, key);
        }
        for (width, height) in (0..24).flat_map(|width| (0..14).map(move |height| (width, height))) {
            screen(&mut app, start, width, height);
            screen(&mut app, lost, height, width);
        }
        app.store(Ok(sample(start, &many)));
        press(&mut app, KeyCode::Esc);
    }
    assert_eq!(screen(&mut app, start, 1, 1).len(), 1);
}
