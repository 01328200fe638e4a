//! Unary tonic calls over a Unix socket. The service is hand-written, so that no protocol compiler is needed.

use std::convert::Infallible;
use std::process::{Child, Command};
use std::rc::Rc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use futures_util::future::BoxFuture;
use http::uri::PathAndQuery;
use hyper_util::rt::TokioIo;
use tokio::net::{UnixListener, UnixStream};
use tokio_stream::wrappers::UnixListenerStream;
use tonic::body::BoxBody;
use tonic::codec::ProstCodec;
use tonic::server::{Grpc, NamedService, UnaryService};
use tonic::transport::{Channel, Endpoint, Server};
use tonic::{Request, Response, Status};

use crate::{Order, Result, median, orders, rate, tell};

/// Maximum size of a message, in bytes.
const MESSAGE_BYTES_MAX: usize = 128 << 20;

#[derive(Clone, PartialEq, prost::Message)]
struct Bytes {
    #[prost(bytes = "vec", tag = "1")]
    data: Vec<u8>,
}

/// A service that either returns each message or forwards it to the next service.
#[derive(Clone)]
struct Echo {
    next: Option<Client>,
}

impl UnaryService<Bytes> for Echo {
    type Response = Bytes;
    type Future = BoxFuture<'static, std::result::Result<Response<Bytes>, Status>>;

    fn call(&mut self, request: Request<Bytes>) -> Self::Future {
        let next = self.next.clone();
        Box::pin(async move {
            let message = request.into_inner();
            Ok(Response::new(match next {
                Some(mut next) => next.call(message).await?,
                None => message,
            }))
        })
    }
}

impl NamedService for Echo {
    const NAME: &'static str = "peer.Echo";
}

impl tower::Service<http::Request<BoxBody>> for Echo {
    type Response = http::Response<BoxBody>;
    type Error = Infallible;
    type Future = BoxFuture<'static, std::result::Result<Self::Response, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<std::result::Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<BoxBody>) -> Self::Future {
        let service = self.clone();
        Box::pin(async move {
            let mut grpc = Grpc::new(ProstCodec::<Bytes, Bytes>::default())
                .max_decoding_message_size(MESSAGE_BYTES_MAX);
            Ok(grpc.unary(service, request).await)
        })
    }
}

#[derive(Clone)]
struct Client(tonic::client::Grpc<Channel>);

impl Client {
    async fn connect(socket: &str) -> Result<Self> {
        let path = socket.to_owned();
        let until = Instant::now() + Duration::from_secs(20);
        while !std::path::Path::new(socket).exists() && Instant::now() < until {
            tokio::time::sleep(Duration::from_micros(100)).await;
        }
        let connect = tower::service_fn(move |_| {
            let path = path.clone();
            async move { Ok::<_, std::io::Error>(TokioIo::new(UnixStream::connect(path).await?)) }
        });
        let channel = Endpoint::from_static("http://peer").connect_with_connector(connect).await?;
        Ok(Self(tonic::client::Grpc::new(channel).max_decoding_message_size(MESSAGE_BYTES_MAX)))
    }

    async fn call(&mut self, message: Bytes) -> std::result::Result<Bytes, Status> {
        self.0.ready().await.map_err(|error| Status::unavailable(error.to_string()))?;
        let path = PathAndQuery::from_static("/peer.Echo/Echo");
        let reply = self.0.unary(Request::new(message), path, ProstCodec::<Bytes, Bytes>::default()).await?;
        Ok(reply.into_inner())
    }

    async fn echo(&mut self, bytes: usize) -> Result<()> {
        let reply = self.call(Bytes { data: vec![b'x'; bytes] }).await?;
        if reply.data.len() == bytes { Ok(()) } else { Err("too few bytes came back".into()) }
    }
}

pub async fn serve(socket: &str, next: Option<&str>) -> Result<()> {
    let next = match next {
        Some(next) => Some(Client::connect(next).await?),
        None => None,
    };
    let listener = UnixListenerStream::new(UnixListener::bind(socket)?);
    Ok(Server::builder().add_service(Echo { next }).serve_with_incoming(listener).await?)
}

/// A client and the processes it communicates with.
struct Chain {
    processes: Vec<Child>,
    client: Client,
}

impl Chain {
    /// Restarts all processes.
    async fn start(hops: usize) -> Result<Self> {
        let folder = std::env::temp_dir().join(format!("peer-{}", std::process::id()));
        std::fs::create_dir_all(&folder)?;
        let path = |name: &str| folder.join(name).to_string_lossy().into_owned();
        let (near, far) = (path("near"), path("far"));
        for socket in [&near, &far] {
            let _ = std::fs::remove_file(socket);
        }
        let own = std::env::current_exe()?;
        let mut processes = vec![Command::new(&own).args(["tonic-server", &far]).spawn()?];
        if hops == 2 {
            processes.push(Command::new(&own).args(["tonic-relay", &near, &far]).spawn()?);
        }
        let client = Client::connect(if hops == 2 { &near } else { &far }).await?;
        Ok(Self { processes, client })
    }
}

impl Drop for Chain {
    fn drop(&mut self) {
        for process in &mut self.processes {
            let _ = process.kill();
            let _ = process.wait();
        }
    }
}

pub async fn drive(hops: usize) -> Result<()> {
    let mut chain = Chain::start(hops).await?;
    for order in orders() {
        match order? {
            Order::Latency { bytes, total } => {
                let mut times = Vec::with_capacity(total);
                for _ in 0..total {
                    let began = Instant::now();
                    chain.client.echo(bytes).await?;
                    times.push(began.elapsed());
                }
                tell("us", median(times).as_secs_f64() * 1e6)?;
            }
            Order::Rate { lanes, bytes, total } => {
                let (began, each) = (Instant::now(), total / lanes);
                let client = Rc::new(chain.client.clone());
                let lanes = (0..lanes).map(|_| {
                    let mut client = Client::clone(&client);
                    async move {
                        for _ in 0..each {
                            client.echo(bytes).await?;
                        }
                        Ok::<_, Box<dyn std::error::Error + Send + Sync>>(())
                    }
                });
                futures_util::future::try_join_all(lanes).await?;
                tell("rate", rate(total, began))?;
            }
            Order::Recovery { total } => {
                let mut times = Vec::new();
                for _ in 0..total {
                    let began = Instant::now();
                    chain.processes[0].kill()?;
                    // The caller restarts the process, as in the bare chain of the bench.
                    while chain.client.echo(64).await.is_ok() {}
                    drop(chain);
                    chain = Chain::start(hops).await?;
                    chain.client.echo(64).await?;
                    times.push(began.elapsed());
                }
                tell("ms", median(times).as_secs_f64() * 1e3)?;
            }
        }
    }
    Ok(())
}
