//! The running server: listening, connections, and the end in good order.

use crate::admission::{Admission, RateLimit};
use crate::fleet::{Fleet, FleetOptions};
use crate::http::{self, ApiKey, Service};
use crate::metrics::Metrics;
use crate::patience::Impatient;
use crate::tls;
use axum::body::Body;
use axum::extract::ConnectInfo;
use axum::http::Request;
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use thiserror::Error;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpListener;
use tokio::sync::{Semaphore, watch};
use tokio_rustls::TlsAcceptor;
use tower::ServiceExt;

/// What a server is started with.
#[derive(Debug, Clone)]
pub struct ServerConfig {
    /// Where it listens.
    pub listen: SocketAddr,
    /// The key clients must have; `None` lets everybody in.
    pub api_key: Option<ApiKey>,
    /// Origins of web pages that may ask, e.g. `http://localhost:3000`.
    pub origins: Vec<String>,
    /// Certificates and key.
    pub tls: Option<(PathBuf, PathBuf)>,
    /// Models and workers.
    pub fleet: FleetOptions,
    /// Whether the default model is loaded before the first request.
    pub prewarm: bool,
    /// Requests that may wait beside those that run.
    pub queue_capacity: usize,
    /// Requests a minute of a client that is not on this machine; 0 for any number.
    pub rate_limit_per_minute: u32,
    /// Whether clients on this machine are limited, too.
    pub rate_limit_local: bool,
    /// Bytes of a body at most.
    pub max_body_bytes: usize,
    /// Characters of a message or prompt at most.
    pub max_chars: usize,
    /// From the arrival of a request to the end of its answer.
    pub request_limit: Duration,
    /// For the head of a request, and again for its body, and for a client to take in something of its answer.
    pub body_limit: Duration,
    /// For admitted requests at the end of the service.
    pub drain_limit: Duration,
    /// Connections at a time.
    pub max_connections: usize,
    /// Silence in a stream before a comment is sent.
    pub heartbeat: Duration,
}

/// A server could not start or had to end.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ServeError {
    /// The address.
    #[error("cannot listen on {address}: {source}; is another server there? --port chooses another port")]
    Listen {
        /// Where.
        address: SocketAddr,
        /// Why.
        source: io::Error,
    },
    /// Certificate or key.
    #[error(transparent)]
    Tls(#[from] tls::TlsError),
    /// No model.
    #[error("there is no model to serve; `npuhal pull` fetches one, or name a file with -m")]
    NoModels,
    /// The runtime.
    #[error("the server cannot start its threads: {0}")]
    Runtime(io::Error),
}

/// What is told once the server listens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Started {
    /// Where it really listens.
    pub address: SocketAddr,
}

/// Tells a server to end.
#[derive(Debug)]
pub struct Stop(watch::Sender<bool>);

/// What a server waits for.
#[derive(Debug, Clone)]
pub struct Stopped(watch::Receiver<bool>);

/// A pair: who holds the first ends the server that has the second. Dropping the first ends it, too.
#[must_use]
pub fn stop_signal() -> (Stop, Stopped) {
    let (sender, receiver) = watch::channel(false);
    (Stop(sender), Stopped(receiver))
}

impl Stop {
    /// Ends the server in good order.
    pub fn stop(&self) {
        self.0.send_replace(true);
    }
}

/// Serves until `stop` is told, then finishes what was admitted. Blocks; makes its own runtime.
///
/// # Errors
/// [`ServeError`].
pub fn run(config: ServerConfig, stop: Stopped, on_start: impl FnOnce(Started) + Send) -> Result<(), ServeError> {
    // One thread: what a token does here takes some tens of microseconds, and a second thread would be woken for each step of
    // it, on cores that the worker computes on.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(ServeError::Runtime)?;
    let result = runtime.block_on(serve(config, stop.0, on_start));
    // What is left are connections of clients that do not read.
    runtime.shutdown_timeout(Duration::from_millis(200));
    result
}

async fn serve(
    config: ServerConfig,
    mut stop: watch::Receiver<bool>,
    on_start: impl FnOnce(Started) + Send,
) -> Result<(), ServeError> {
    if config.fleet.models.is_empty() {
        return Err(ServeError::NoModels);
    }
    let tls = config.tls.as_ref().map(|(certificates, key)| tls::acceptor(certificates, key)).transpose()?;
    let listen = |source| ServeError::Listen { address: config.listen, source };
    let listener = TcpListener::bind(config.listen).await.map_err(listen)?;
    let address = listener.local_addr().map_err(listen)?;
    let metrics = Arc::new(Metrics::new());
    let running = config.fleet.parallel.max(1) as usize * config.fleet.max_resident.max(1);
    let admission = Admission::new(running, config.queue_capacity);
    let default_model = config.fleet.default;
    let fleet = Fleet::new(config.fleet, Arc::clone(&metrics));
    let service = Arc::new(Service {
        fleet: Arc::clone(&fleet),
        admission: Arc::clone(&admission),
        rate_limit: RateLimit::new(config.rate_limit_per_minute, config.rate_limit_local),
        metrics,
        api_key: config.api_key,
        origins: config.origins,
        max_body_bytes: config.max_body_bytes,
        max_chars: config.max_chars,
        body_limit: config.body_limit,
        request_limit: config.request_limit,
        heartbeat: config.heartbeat,
    });
    let router = http::router(service);
    let (closing, closed) = watch::channel(false);
    let connections = Arc::new(Semaphore::new(config.max_connections));
    let accepting = accept(listener, tls, router, Arc::clone(&connections), config.body_limit, closed);
    let accepting = tokio::spawn(accepting);
    if config.prewarm {
        fleet.prewarm(default_model);
    }
    on_start(Started { address });
    is_true(&mut stop).await;
    admission.drain();
    let drain_end = Instant::now() + config.drain_limit;
    tracing::info!(active = admission.active(), "draining");
    if tokio::time::timeout(config.drain_limit, admission.idle()).await.is_err() {
        tracing::warn!(active = admission.active(), "requests did not end in time and are given up");
    }
    // Connections finish the answers that are on their way; those that ask for nothing end at once.
    let _ = closing.send(true);
    fleet.close().await;
    let ended = async {
        let _ = accepting.await;
        // All permits are there when all connections have ended.
        let all = u32::try_from(config.max_connections).unwrap_or(u32::MAX);
        let _ = connections.acquire_many(all).await;
    };
    let limit = drain_end.saturating_duration_since(Instant::now()).max(CLOSING_LIMIT);
    if tokio::time::timeout(limit, ended).await.is_err() {
        tracing::info!("clients that do not take in their answers are given up");
    }
    Ok(())
}

/// Accepts connections until the end; while the service drains it still does, so that clients are told.
async fn accept(
    listener: TcpListener,
    tls: Option<TlsAcceptor>,
    router: axum::Router,
    connections: Arc<Semaphore>,
    head_limit: Duration,
    mut closed: watch::Receiver<bool>,
) {
    loop {
        let permit = tokio::select! {
            permit = Arc::clone(&connections).acquire_owned() => permit,
            () = is_true(&mut closed) => return,
        };
        let Ok(permit) = permit else { return };
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = is_true(&mut closed) => return,
        };
        let (socket, client) = match accepted {
            Ok(accepted) => accepted,
            Err(error) => {
                // Out of descriptors, or a client that went away at once.
                tracing::warn!(%error, "a connection could not be accepted");
                tokio::time::sleep(Duration::from_millis(50)).await;
                continue;
            }
        };
        // Tokens are small and should not wait for each other; without it they come a little later.
        let _ = socket.set_nodelay(true);
        let (tls, router, mut closed) = (tls.clone(), router.clone(), closed.clone());
        tokio::spawn(async move {
            let _permit = permit;
            match tls {
                None => converse(socket, router, client, head_limit, closed).await,
                Some(tls) => {
                    let handshake = tokio::select! {
                        handshake = tokio::time::timeout(head_limit, tls.accept(socket)) => handshake,
                        () = is_true(&mut closed) => return,
                    };
                    match handshake {
                        Ok(Ok(socket)) => converse(socket, router, client, head_limit, closed).await,
                        Ok(Err(error)) => tls::note_failed_handshake(&error),
                        Err(_) => {}
                    }
                }
            }
        });
    }
}

/// One connection, with as many requests as the client sends.
async fn converse(
    socket: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    router: axum::Router,
    client: SocketAddr,
    head_limit: Duration,
    mut closed: watch::Receiver<bool>,
) {
    let has_asked = Arc::new(AtomicBool::new(false));
    let asking = Arc::clone(&has_asked);
    let service = service_fn(move |request: Request<Incoming>| {
        asking.store(true, Ordering::Relaxed);
        let router = router.clone();
        async move {
            let mut request = request.map(Body::new);
            if let Some(uri) = http::normalized(request.uri()) {
                *request.uri_mut() = uri;
            }
            request.extensions_mut().insert(ConnectInfo(client));
            router.oneshot(request).await
        }
    });
    let mut builder = hyper::server::conn::http1::Builder::new();
    builder.timer(TokioTimer::new()).header_read_timeout(head_limit).max_buf_size(MAX_HEAD_BYTES);
    let connection = builder.serve_connection(TokioIo::new(Impatient::new(socket, head_limit)), service);
    tokio::pin!(connection);
    let end = tokio::select! {
        end = connection.as_mut() => end,
        () = is_true(&mut closed) => {
            // Nothing was admitted that is not complete; who has not asked yet comes too late.
            if !has_asked.load(Ordering::Relaxed) {
                return;
            }
            connection.as_mut().graceful_shutdown();
            connection.as_mut().await
        }
    };
    if let Err(error) = end {
        tracing::debug!(%client, %error, "a connection broke off");
    }
}

/// For clients to take in their answers, even where no time is left for more.
const CLOSING_LIMIT: Duration = Duration::from_secs(2);

/// Bytes of a request's head at most.
const MAX_HEAD_BYTES: usize = 64 << 10;

/// Waits until `flag` is true; a sender that is gone has ended, too.
async fn is_true(flag: &mut watch::Receiver<bool>) {
    let _ = flag.wait_for(|flag| *flag).await;
}
