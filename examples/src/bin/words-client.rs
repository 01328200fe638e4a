//! A client that submits two jobs. This is the program shown in `docs/client.md`.

use std::error::Error;
use std::time::Duration;

use bulkhead_client::Client;

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let client = Client::connect(std::env::var("BULKHEAD_SOCKET")?).await?;

    let job = client.job("words", "three short words").deadline(Duration::from_secs(5));
    let reply = job.send().await?;
    print!("words: {}", String::from_utf8_lossy(reply.payload()));

    if let Err(error) = client.job("slow", "").send().await {
        println!("{error}");
        println!("executed: {:?}, retryable: {}", error.executed(), error.is_retryable());
    }
    Ok(())
}
