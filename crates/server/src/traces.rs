//! Traces for an OpenTelemetry collector: a span a request, below it one an answer, with its time in
//! the queue, of its prompt and of its tokens. Never a text.

use crate::run::Accounts;
use async_trait::async_trait;
use axum::http::uri::{Parts, PathAndQuery, Scheme};
use axum::http::{HeaderMap, HeaderValue, Uri, header};
use http_body_util::{BodyExt, Full, Limited};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use opentelemetry::propagation::TextMapPropagator;
use opentelemetry::trace::{Span, SpanKind, Status, TraceContextExt, Tracer, TracerProvider};
use opentelemetry::{Context, KeyValue};
use opentelemetry_http::{Bytes, HeaderExtractor, HttpClient, HttpError, Request, Response};
use opentelemetry_otlp::{SpanExporter, WithExportConfig, WithHttpConfig};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::propagation::TraceContextPropagator;
use opentelemetry_sdk::trace::{SdkTracer, SdkTracerProvider};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, SystemTime};
use tokio::net::TcpStream;
use tokio::runtime::Handle;

/// Longest exchange with the collector.
const EXCHANGE: Duration = Duration::from_secs(10);

/// Longest answer of the collector that is read, in bytes.
const ANSWER: usize = 1 << 20;

/// Where spans go. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Traces {
    provider: SdkTracerProvider,
    tracer: SdkTracer,
}

/// Traces that cannot be sent.
#[derive(Debug, thiserror::Error)]
pub enum TracesError {
    /// Not the address of a collector.
    #[error(
        "{endpoint:?} is no address of a collector; it must be http://HOST[:PORT][/PATH], to which \
         /v1/traces is added"
    )]
    Endpoint {
        /// What was given.
        endpoint: String,
    },
    /// Settings in the environment that the exporter does not take.
    #[error("traces cannot be sent: {0}")]
    Exporter(#[from] opentelemetry_otlp::ExporterBuildError),
}

impl Traces {
    /// Sends spans to the collector at `endpoint`, as protobuf over HTTP, in batches. `runtime` does
    /// the sending and must outlive [`Traces::shutdown`].
    pub fn to(endpoint: &str, runtime: Handle) -> Result<Self, TracesError> {
        let uri = collector(endpoint)
            .ok_or_else(|| TracesError::Endpoint { endpoint: endpoint.to_owned() })?;
        let exporter = SpanExporter::builder()
            .with_http()
            .with_http_client(Collector { runtime, failing: AtomicBool::new(false) })
            .with_endpoint(uri.to_string())
            .with_timeout(EXCHANGE)
            .build()?;
        let mut resource = Resource::builder();
        if std::env::var_os("OTEL_SERVICE_NAME").is_none() {
            resource = resource.with_service_name("deepinfer");
        }
        let provider = SdkTracerProvider::builder()
            .with_batch_exporter(exporter)
            .with_resource(resource.build())
            .build();
        Ok(Self { tracer: provider.tracer("deepinfer"), provider })
    }

    /// Opens a request's span, which ends when the last clone of the context is dropped. A caller's
    /// `traceparent` is continued.
    pub fn request(&self, method: &str, route: &'static str, headers: &HeaderMap) -> Context {
        let parent = TraceContextPropagator::new()
            .extract_with_context(&Context::new(), &HeaderExtractor(headers));
        let span = self
            .tracer
            .span_builder(format!("{method} {route}"))
            .with_kind(SpanKind::Server)
            .with_attributes([
                KeyValue::new("http.request.method", method.to_owned()),
                KeyValue::new("http.route", route),
            ])
            .start_with_context(&self.tracer, &parent);
        Context::new().with_span(span)
    }

    /// Adds the response to a request's span.
    pub fn response(request: &Context, id: &str, status: u16) {
        let span = request.span();
        span.set_attribute(KeyValue::new("http.request.id", id.to_owned()));
        span.set_attribute(KeyValue::new("http.response.status_code", i64::from(status)));
        if status >= 500 {
            span.set_status(Status::error("the server failed"));
        }
    }

    /// Adds an answer that has just ended below a request's span.
    pub fn answer(
        &self,
        request: &Context,
        protocol: &'static str,
        outcome: &'static str,
        accounts: &Accounts,
    ) {
        let end = SystemTime::now();
        let Some(start) = end.checked_sub(accounts.total) else { return };
        let count = |name, n: usize| KeyValue::new(name, i64::try_from(n).unwrap_or(i64::MAX));
        let mut span = self
            .tracer
            .span_builder(protocol)
            .with_start_time(start)
            .with_attributes([
                KeyValue::new("gen_ai.response.finish_reasons", outcome),
                count("gen_ai.usage.input_tokens", accounts.prompt_tokens),
                count("gen_ai.usage.output_tokens", accounts.output_tokens),
                count("deepinfer.cached_tokens", accounts.cached_tokens),
                count("deepinfer.drafted_tokens", accounts.drafted),
                count("deepinfer.verified_tokens", accounts.verified),
                count("deepinfer.accepted_tokens", accounts.accepted),
            ])
            .start_with_context(&self.tracer, request);
        if outcome == "failed" {
            span.set_status(Status::error("the answer failed"));
        }
        let answer = request.with_span(span);
        let mut from = start;
        for (name, time) in accounts.phases() {
            let Some(time) = time else { break };
            let to = from + time;
            let builder = self.tracer.span_builder(name).with_start_time(from);
            builder.start_with_context(&self.tracer, &answer).end_with_timestamp(to);
            from = to;
        }
        answer.span().end_with_timestamp(end);
    }

    /// Sends what has not been sent yet. Blocks; not for the runtime's own threads.
    pub fn shutdown(&self) {
        if let Err(error) = self.provider.shutdown() {
            tracing::warn!(%error, "the last traces were not sent");
        }
    }
}

/// The address that spans are sent to.
fn collector(endpoint: &str) -> Option<Uri> {
    let uri: Uri = endpoint.parse().ok()?;
    let path = format!("{}/v1/traces", uri.path().trim_end_matches('/'));
    let mut parts: Parts = uri.into_parts();
    let plain = parts.scheme == Some(Scheme::HTTP) && parts.authority.is_some();
    parts.path_and_query = Some(PathAndQuery::try_from(path).ok()?);
    Uri::from_parts(parts).ok().filter(|_| plain)
}

/// A client for one exchange at a time.
#[derive(Debug)]
struct Collector {
    runtime: Handle,
    /// Whether the last exchange failed: each change is logged, not each failure.
    failing: AtomicBool,
}

#[async_trait]
impl HttpClient for Collector {
    async fn send_bytes(&self, request: Request<Bytes>) -> Result<Response<Bytes>, HttpError> {
        // The caller's thread is not one of the runtime's.
        let limited = async { tokio::time::timeout(EXCHANGE, exchange(request)).await };
        let sent = self.runtime.spawn(limited).await;
        let result = match sent {
            Ok(Ok(result)) => result,
            Ok(Err(_)) => Err("it did not answer in time".into()),
            Err(error) => Err(error.into()),
        };
        match &result {
            Ok(_) if self.failing.swap(false, Relaxed) => {
                tracing::info!("traces reach the collector again");
            }
            Err(error) if !self.failing.swap(true, Relaxed) => {
                tracing::warn!(%error, "traces do not reach the collector");
            }
            _ => {}
        }
        result
    }
}

async fn exchange(request: Request<Bytes>) -> Result<Response<Bytes>, HttpError> {
    let (mut parts, body) = request.into_parts();
    let authority = parts.uri.authority().cloned().ok_or("the address has no host")?;
    let host = authority.host().trim_start_matches('[').trim_end_matches(']');
    let stream = TcpStream::connect((host, authority.port_u16().unwrap_or(80))).await?;
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
    tokio::spawn(connection);
    let path = parts.uri.path_and_query().map_or("/", PathAndQuery::as_str);
    parts.uri = path.parse()?;
    parts.headers.insert(header::HOST, HeaderValue::from_str(authority.as_str())?);
    let request = Request::from_parts(parts, Full::new(body));
    let (parts, body) = sender.send_request(request).await?.into_parts();
    let body = Limited::new(body, ANSWER).collect().await?.to_bytes();
    Ok(Response::from_parts(parts, body))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_of_collectors() {
        for (given, wanted) in [
            ("http://a:4318", Some("http://a:4318/v1/traces")),
            ("http://a:4318/", Some("http://a:4318/v1/traces")),
            ("http://a/x/", Some("http://a/x/v1/traces")),
            ("https://a:4318", None),
            ("a:4318", None),
            ("/v1/traces", None),
            ("", None),
        ] {
            let found = collector(given).map(|uri| uri.to_string());
            assert_eq!(found.as_deref(), wanted, "{given}");
        }
    }
}
