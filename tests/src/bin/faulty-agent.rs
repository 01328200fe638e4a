//! An agent with an injected fault, used in place of `bulkhead-fleet agent`. The last argument names the fault.

use std::path::PathBuf;

use bulkhead_fleet::Faults;
use bulkhead_fleet::settings::Settings;

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    let [_, _, config, _, fault] = &arguments[..] else {
        panic!("usage: faulty-agent --config FILE agent FAULT")
    };
    let mut faults = Faults::default();
    match fault.as_str() {
        "acknowledges-before-record" => faults.acknowledges_before_record = true,
        "claims-without-expectation" => faults.claims_without_expectation = true,
        other => panic!("unknown fault {other}"),
    }
    let settings = Settings::read(&PathBuf::from(config)).expect("a valid file");
    let runtime = tokio::runtime::Runtime::new().expect("a runtime starts");
    runtime
        .block_on(bulkhead_fleet::agent::run(settings, faults, std::future::pending()))
        .expect("the agent runs");
}
