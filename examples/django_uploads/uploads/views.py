"""Storing a file, showing where it is, and hearing what the runner found in it."""

import hashlib
import json

from django import forms
from django.conf import settings
from django.core.files.uploadedfile import UploadedFile
from django.db import transaction
from django.http import FileResponse, HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.urls import reverse
from django.utils.crypto import constant_time_compare
from django.views.decorators.csrf import csrf_exempt
from django.views.decorators.http import require_POST, require_safe

from relaybox.contrib.django import emit_event
from relaybox.contrib.django.models import OutboxDestination

from .deliveries import latest_deliveries
from .models import Upload

SHOWN = 50


class UploadForm(forms.Form):
    """One file, which is not empty."""

    file = forms.FileField()


def index(request: HttpRequest) -> HttpResponse:
    """The page: a form, and the latest uploads with the states of their deliveries."""
    form = UploadForm(request.POST or None, request.FILES or None)
    if request.method == "POST" and form.is_valid():
        store(request, form.cleaned_data["file"])
        return redirect("index")
    uploads = list(Upload.objects.order_by("-pk")[:SHOWN])
    deliveries = latest_deliveries(uploads)
    context = {
        "form": form,
        "rows": [(upload, deliveries.get(str(upload.pk))) for upload in uploads],
        "trouble": OutboxDestination.objects.filter(name="runner").exclude(circuit="closed").first(),
    }
    return render(request, "uploads/index.html", context)


def store(request: HttpRequest, file: UploadedFile) -> None:
    """Keep a file and tell the runner of it: both or neither."""
    sha256 = hashlib.sha256()
    for chunk in file.chunks():
        sha256.update(chunk)
    with transaction.atomic():
        upload = Upload.objects.create(name=file.name, size=file.size, sha256=sha256.hexdigest(), file=file)
        payload = {
            "name": upload.name,
            "size": upload.size,
            "sha256": upload.sha256,
            "content": request.build_absolute_uri(reverse("content", args=[upload.pk])),
            "report": request.build_absolute_uri(reverse("report", args=[upload.pk])),
        }
        emit_event("Upload", upload.pk, "file.stored", payload)


@require_safe
def content(request: HttpRequest, pk: int) -> FileResponse:
    """The file itself."""
    upload = get_object_or_404(Upload, pk=pk)
    return FileResponse(upload.file.open(), as_attachment=True, filename=upload.name)


@csrf_exempt
@require_POST
def report(request: HttpRequest, pk: int) -> HttpResponse:
    """Store what the runner found. It may get an event twice and so report twice; that changes nothing."""
    given = request.headers.get("authorization", "")
    if not constant_time_compare(given, f"Bearer {settings.RUNNER_TOKEN}"):
        return HttpResponse("the token is wrong", status=401)
    with transaction.atomic():
        upload = get_object_or_404(Upload.objects.select_for_update(), pk=pk)
        if upload.state == Upload.State.STORED:
            upload.state, upload.words = Upload.State.PROCESSED, json.loads(request.body)["words"]
            upload.save(update_fields=["state", "words"])
            emit_event("Upload", upload.pk, "file.processed", {"name": upload.name, "words": upload.words})
    return HttpResponse(status=204)
