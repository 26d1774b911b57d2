//! Connections: accepting them, and ending well.

use crate::app::App;
use crate::router::router;
use crate::watch;
use crate::write_limit::WriteLimit;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::{GracefulShutdown, Watcher};
use hyper_util::service::TowerToHyperService;
use std::future::Future;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::signal::unix::{SignalKind, signal};

/// Why a server stopped otherwise than it was told to.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// A signal handler could not be set.
    #[error("signals cannot be handled: {0}")]
    Signal(#[source] std::io::Error),
    /// The engine died or hung; requests were answered with errors.
    #[error("the engine has failed: {reason}")]
    Engine {
        /// Why.
        reason: String,
    },
}

type Service = TowerToHyperService<axum::Router>;

/// Serves a connection until it ends, or its last response after the server has begun to drain.
async fn connection(
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    service: Service,
    watcher: Watcher,
    limit: Duration,
) {
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(limit)
        .serve_connection(TokioIo::new(stream), service);
    // A client's fault, or its leaving.
    if let Err(error) = watcher.watch(connection).await {
        tracing::debug!(%error, "connection");
    }
}

/// Room for what has been sent and not been read.
const SEND_BUFFER: u32 = 128 << 10;

/// Bounds what the system keeps of what was sent and has not been read. Without a bound it grows to
/// megabytes, of which a slow reader must take a third before the system tells that it reads.
fn bound_send_buffer(stream: &TcpStream) -> std::io::Result<()> {
    // Another handle of the same socket.
    let handle = stream.as_fd().try_clone_to_owned()?;
    TcpSocket::from_std_stream(handle.into()).set_send_buffer_size(SEND_BUFFER)
}

/// Time that clients get to read their errors after the engine has failed.
const LAST_WORDS: Duration = Duration::from_secs(2);

/// Serves until SIGTERM or SIGINT: then no new requests are taken, and running ones may end within
/// [`crate::Config::drain_limit`]; a second signal stops at once.
pub async fn serve(app: Arc<App>, listener: TcpListener) -> Result<(), ServeError> {
    let mut term = signal(SignalKind::terminate()).map_err(ServeError::Signal)?;
    let mut int = signal(SignalKind::interrupt()).map_err(ServeError::Signal)?;
    let mut next_signal = async move || {
        tokio::select! { _ = term.recv() => {}, _ = int.recv() => {} }
    };
    let (first, second) = (tokio::sync::Notify::new(), tokio::sync::Notify::new());
    let signals = async {
        next_signal().await;
        first.notify_one();
        next_signal().await;
        second.notify_one();
        std::future::pending::<()>().await;
    };
    tokio::select! {
        result = serve_until(app, listener, first.notified(), second.notified()) => result,
        () = signals => Ok(()),
    }
}

/// Serves until `drain` is done, and then until requests have ended, `stop` is done, or the time for
/// it is over. Ends with an error if the engine fails.
pub async fn serve_until(
    app: Arc<App>,
    listener: TcpListener,
    drain: impl Future<Output = ()>,
    stop: impl Future<Output = ()>,
) -> Result<(), ServeError> {
    watch::start(&app);
    let tester = app.clone();
    std::thread::spawn(move || watch::self_test(&tester));
    let service = Service::new(router(app.clone()));
    let graceful = GracefulShutdown::new();
    let mut failures = app.failures();
    let failed = async {
        let reason = failures.wait_for(Option::is_some).await;
        reason.ok().and_then(|reason| reason.clone()).unwrap_or_default()
    };
    let accept = async {
        loop {
            let Ok((stream, _)) = listener.accept().await else {
                // Out of file handles, most likely: some will come back.
                tokio::time::sleep(Duration::from_millis(50)).await;
                continue;
            };
            let _ = stream.set_nodelay(true);
            let _ = bound_send_buffer(&stream);
            let stream = WriteLimit::new(stream, app.config.write_timeout);
            let (service, watcher) = (service.clone(), graceful.watcher());
            let limit = app.config.read_timeout;
            match &app.config.tls {
                None => drop(tokio::spawn(connection(stream, service, watcher, limit))),
                Some(tls) => {
                    let handshake = tls.acceptor().accept(stream);
                    tokio::spawn(async move {
                        match tokio::time::timeout(limit, handshake).await {
                            Ok(Ok(stream)) => connection(stream, service, watcher, limit).await,
                            Ok(Err(error)) => tracing::debug!(%error, "handshake"),
                            Err(_) => tracing::debug!("the handshake took too long"),
                        }
                    });
                }
            }
        }
    };
    let reason = tokio::select! {
        () = accept => None,
        () = drain => None,
        reason = failed => Some(reason),
    };
    app.draining.store(true, Relaxed);
    drop(listener);
    let limit = if reason.is_some() { LAST_WORDS } else { app.config.drain_limit };
    let open = app.open.load(Relaxed);
    tracing::info!(open, limit_s = limit.as_secs(), "draining");
    tokio::select! {
        () = graceful.shutdown() => {}
        () = stop => {}
        () = tokio::time::sleep(limit) => {}
    }
    match reason {
        Some(reason) => Err(ServeError::Engine { reason }),
        None => Ok(()),
    }
}
