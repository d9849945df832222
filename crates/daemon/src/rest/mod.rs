//! The REST API: roles, requests and answers. [`crate::engine`] carries the requests out.
//!
//! Handlers are thin: each calls one function of the engine, on a thread that may wait.

mod access;
mod answer;
mod arrays;
mod asks;
mod audit;
mod body;
mod bounds;
mod connections;
mod current;
mod devices;
mod exports;
mod headers;
mod hosts;
mod idempotency;
mod jobs;
mod judge;
mod judged;
mod keys;
mod listen;
mod listing;
mod logins;
mod masking;
mod page;
mod pools;
mod portals;
mod queries;
mod request;
mod responses;
mod roles;
mod system;
mod token_file;
mod tokens;
mod transport;
mod volumes;

pub use keys::KeysError;
pub use listen::{ListenError, Listeners, TcpOptions, UnixOptions};
pub use roles::{Ask, MATRIX, Role, Row};
pub use token_file::{NewToken, NewTokenError, add_token};
pub use tokens::{Tokens, TokensError, parse_role, parse_time};

use crate::api_error::ApiError;
use crate::engine::Engine;
use answer::{Answer, Failure};
use api::Job;
use asks::OwnPlaces;
use audit::Audit;
use axum::Router;
use axum::extract::DefaultBodyLimit;
use axum::http::StatusCode;
use axum::middleware::{from_fn, from_fn_with_state};
use keys::Keys;
use masking::Masking;
use queries::Queries;
use request::Prefer;
use std::sync::Arc;
use std::time::Duration;
use utoipa::OpenApi;
use utoipa::openapi::OpenApi as Document;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

/// The context of handlers.
#[derive(Clone)]
struct Context {
    engine: Arc<Engine>,
    /// The document, as it is sent.
    document: Arc<str>,
    /// Places that exports of every role may name.
    own: OwnPlaces,
}

#[derive(OpenApi)]
#[openapi(
    info(
        title = "freestoned",
        description = "Devices, arrays, volumes and exports of a Freestone daemon. Over TCP each request carries a \
                       token (`Authorization: Bearer …`), whose role decides what it may do. The daemon performs a \
                       POST with an `Idempotency-Key` once, and a change with `If-Match` only if the object is unchanged.",
        license(name = "MIT OR Apache-2.0")
    ),
    tags(
        (name = "devices", description = "Files, drives and network storage that back arrays and volumes"),
        (name = "arrays", description = "RAID arrays and their members"),
        (name = "volumes", description = "Volumes, and groups that share limits"),
        (name = "exports", description = "Exports, to which clients attach, and portals, which exports share"),
        (name = "jobs", description = "Long-running jobs"),
        (name = "system", description = "The daemon: state, events, counters and metrics")
    )
)]
struct Api;

fn api() -> OpenApiRouter<Context> {
    OpenApiRouter::with_openapi(Api::openapi())
        .routes(routes!(devices::disks))
        .routes(routes!(devices::list, devices::create))
        .routes(routes!(devices::show, devices::change, devices::delete))
        .routes(routes!(devices::snapshots, devices::create_snapshot))
        .routes(routes!(devices::delete_snapshot))
        .routes(routes!(devices::stream))
        .routes(routes!(devices::commit))
        .routes(routes!(arrays::list, arrays::create))
        .routes(routes!(arrays::show, arrays::delete))
        .routes(routes!(arrays::members))
        .routes(routes!(arrays::act))
        .routes(routes!(volumes::list, volumes::create))
        .routes(routes!(volumes::show, volumes::change, volumes::delete))
        .routes(routes!(volumes::relocate))
        .routes(routes!(pools::show))
        .routes(routes!(pools::capacity))
        .routes(routes!(pools::act))
        .routes(routes!(volumes::list_groups))
        .routes(routes!(volumes::set_group, volumes::delete_group))
        .routes(routes!(portals::list, portals::create))
        .routes(routes!(portals::show, portals::delete))
        .routes(routes!(exports::list, exports::create))
        .routes(routes!(exports::show, exports::change, exports::delete))
        .routes(routes!(exports::attach))
        .routes(routes!(exports::clients))
        .routes(routes!(jobs::list))
        .routes(routes!(jobs::show, jobs::change, jobs::cancel))
        .routes(routes!(system::show))
        .routes(routes!(system::health))
        .routes(routes!(system::events))
        .routes(routes!(system::stream))
        .routes(routes!(system::samples))
        .routes(routes!(system::history))
}

/// The OpenAPI document of the API.
pub fn document() -> Document {
    complete(api().into_openapi())
}

/// Adds what the document takes from tables.
fn complete(mut document: Document) -> Document {
    roles::describe(&mut document);
    bounds::describe(&mut document);
    responses::describe(&mut document);
    document
}

/// Everything that the daemon answers, for callers that a listener has let in. Listeners share
/// the keys.
fn router(engine: Arc<Engine>, keys: Keys) -> Router {
    let (router, document) = api().split_for_parts();
    let document = complete(document);
    let audit = Audit::new(engine.clone(), Masking::of(&document));
    let queries = Queries::of(&document);
    let document = document.to_pretty_json().expect("plain data");
    let own = OwnPlaces::of(engine.options());
    let context = Context { engine, document: document.into(), own };
    router
        .route("/v1/openapi.json", axum::routing::get(system::document))
        .route("/", axum::routing::get(page::index))
        .route("/web/{name}", axum::routing::get(page::part))
        .route("/metrics", axum::routing::get(system::metrics))
        .fallback(answer::no_such_path)
        .method_not_allowed_fallback(answer::no_such_method)
        .layer(from_fn_with_state(keys, idempotency::once))
        .layer(from_fn_with_state(audit, audit::record))
        .layer(from_fn_with_state(queries, queries::check))
        .layer(from_fn(judge::judge))
        .layer(DefaultBodyLimit::max(bounds::MAX_BODY))
        .with_state(context)
}

/// How long who prefers a job waits for something to be done, before there is one.
const PATIENCE: Duration = Duration::from_secs(1);

/// Has the engine do something that may take long, and be a `job` meanwhile: then that is the
/// answer for who prefers it.
async fn run_long<T: Send + 'static>(
    context: Context,
    prefer: Prefer,
    status: StatusCode,
    work: impl FnOnce(&Engine) -> Result<T, ApiError> + Send + 'static,
    job: impl Fn(&Engine) -> Result<Job, ApiError> + Clone + Send + 'static,
) -> Result<Answer<T>, Failure> {
    let done = |made: Result<T, Failure>| made.map(|made| Answer::Done(status, made));
    if !prefer.is_async {
        return done(run(context, work).await);
    }
    let mut work = std::pin::pin!(run(context.clone(), work));
    loop {
        if let Ok(result) = tokio::time::timeout(PATIENCE, &mut work).await {
            return done(result);
        }
        // A request is no job while it waits for others. A job continues without this handler.
        if let Ok(job) = run(context.clone(), job.clone()).await {
            return Ok(Answer::Job(job));
        }
    }
}

/// Has the engine do something, on a thread that may wait.
async fn run<T: Send + 'static>(
    context: Context,
    work: impl FnOnce(&Engine) -> Result<T, ApiError> + Send + 'static,
) -> Result<T, Failure> {
    match tokio::task::spawn_blocking(move || work(&context.engine)).await {
        Ok(result) => result.map_err(Failure::from),
        Err(error) => {
            tracing::error!(%error, "a request was not carried out");
            Err(Failure::from(ApiError::failed("a defect of the daemon; its log says more")))
        }
    }
}
